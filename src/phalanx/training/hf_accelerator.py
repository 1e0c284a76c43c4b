"""accelerate's Accelerator for a model that is cut over ranks: what it calls a process is a copy of the model.

The Trainer asks its Accelerator how many processes share the data out, gathers results over them, and hands it losses
and models. Here these processes are the data-parallel ranks; a tensor-parallel group is one of them, so that its ranks
see the same batches and everything is counted once. Losses and models go to the training engine.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Self

import torch.distributed as dist
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import recursively_apply
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from phalanx.distributed.mesh import Mesh
from phalanx.training.engine import TrainingEngine
from phalanx.training.trained_model import TrainedModel


class EngineOptimizer(AcceleratedOptimizer):
    """An engine's optimizer. The engine updates in the last backward pass of a step: nothing is left to `step`."""

    def __init__(self, engine: TrainingEngine) -> None:
        super().__init__(engine.optimizer, device_placement=False)
        self._engine = engine

    def step(self, closure: Any = None) -> None: ...

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        self._engine.zero_grad()

    @property
    def step_was_skipped(self) -> bool:
        return not self._engine.was_step_applied()


class MeshAccelerator(Accelerator):
    """An Accelerator over a mesh of ranks; `of` makes one.

    `mesh`: whose data-parallel ranks count as processes. `make_engine`: (model, optimizer) -> TrainingEngine.
    `cut`: cuts a model that is only evaluated, in place.
    """

    mesh: Mesh
    make_engine: Callable[[nn.Module, Optimizer], TrainingEngine]
    cut: Callable[[nn.Module], nn.Module]
    _trained: TrainedModel | None

    @classmethod
    def of(
        cls,
        plain: Accelerator,
        mesh: Mesh,
        make_engine: Callable[[nn.Module, Optimizer], TrainingEngine],
        cut: Callable[[nn.Module], nn.Module],
    ) -> Self:
        """One with the settings of `plain`."""
        made = cls.__new__(cls)
        made.__dict__.update(plain.__dict__)
        made.mesh, made.make_engine, made.cut = mesh, make_engine, cut
        made._trained = None
        return made

    @property
    def num_processes(self) -> int:
        """Data-parallel ranks."""
        return self.mesh.dp.size

    @property
    def process_index(self) -> int:
        """This data-parallel rank."""
        return self.mesh.dp.rank

    # What is trained.

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        model = next((given for given in args if isinstance(given, nn.Module)), None)
        optimizer = next((given for given in args if isinstance(given, Optimizer)), None)
        if model is None or optimizer is None or isinstance(model, TrainedModel):
            return super().prepare(*args, device_placement=device_placement)
        wrapped = self._trained = TrainedModel(self.make_engine(model, optimizer))
        made: dict[int, Any] = {id(model): wrapped, id(optimizer): EngineOptimizer(wrapped.engine)}
        self._models.append(wrapped)
        self._optimizers.append(made[id(optimizer)])
        for one in made.values():
            one._is_accelerate_prepared = True
        return tuple(
            made[id(given)] if id(given) in made else super(MeshAccelerator, self).prepare(given) for given in args
        )

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        if isinstance(model, TrainedModel):
            return model
        if not evaluation_mode:
            raise ValueError(
                "a model that is trained is prepared together with its optimizer: prepare(model, optimizer)"
            )
        cut = self.cut(model)
        self._models.append(cut)
        return cut

    def prepare_data_loader(
        self, data_loader: DataLoader[Any], device_placement: bool | None = None, slice_fn_for_dispatch: Any = None
    ) -> Any:
        seed = getattr(data_loader, "worker_init_fn", None)
        if isinstance(seed, functools.partial) and "rank" in seed.keywords:
            # Workers are seeded by process; the ranks of a tensor-parallel group need the same samples from theirs.
            again = functools.partial(seed.func, *seed.args, **{**seed.keywords, "rank": self.process_index})
            data_loader.worker_init_fn = again
        return super().prepare_data_loader(data_loader, device_placement, slice_fn_for_dispatch)

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        engine = self._engine()
        engine.set_gradient_accumulation_boundary(self.sync_gradients)
        engine.backward(loss, scale_wrt_gas=False)
        engine.step()

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> float | None:
        """The norm of the last update's gradient before clipping; the engine has clipped it already."""
        engine = self._engine()
        if norm_type != 2 or max_norm not in (float("inf"), engine.config.gradient_clipping):
            raise ValueError(
                f"clip_grad_norm_ to {max_norm} (norm {norm_type}): the engine clips the 2-norm to "
                f"{engine.config.gradient_clipping}, as max_grad_norm said when training began"
            )
        return engine.get_global_grad_norm()

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        raise ValueError("gradients lie in the engine: they are clipped by their norm only (max_grad_norm)")

    def unwrap_model(
        self, model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True
    ) -> nn.Module:
        if isinstance(model, TrainedModel):
            model = model.module
        unwrapped: nn.Module = super().unwrap_model(model, keep_fp32_wrapper, keep_torch_compile)
        return unwrapped

    def _engine(self) -> TrainingEngine:
        # Not found in what is prepared: the Trainer empties that list before it trains again.
        if self._trained is None:
            raise RuntimeError("nothing is trained: prepare(model, optimizer) first")
        return self._trained.engine

    # What is gathered.

    def gather(self, tensor: Any) -> Any:
        """Tensors of all copies of the model, one after the other along the first dimension."""
        if self.mesh.dp.size == 1:
            return tensor
        return recursively_apply(
            lambda t: self.mesh.dp.all_gather((t[None] if t.ndim == 0 else t).contiguous()),
            tensor,
            error_on_other_type=True,
        )

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """As `gather`, without the samples that filled up the last batch; objects too, in a list."""
        if not use_gather_object and _all_tensors(input_data):
            return super().gather_for_metrics(input_data)
        lists = [input_data]
        if self.mesh.dp.size > 1:
            lists = [None] * self.mesh.dp.size
            dist.all_gather_object(lists, input_data, group=self.mesh.dp_process_group)
        gathered = [item for each in lists for item in each]
        at_end = self.gradient_state.end_of_dataloader and self.gradient_state.remainder > 0
        return gathered[: self.gradient_state.remainder] if at_end else gathered

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Sum or mean over the copies of the model."""
        if reduction not in ("sum", "mean", "none"):
            raise ValueError(f'reduction is "sum", "mean" or "none", given {reduction!r}')
        if reduction == "none":
            return tensor
        share = 1 / self.mesh.dp.size if reduction == "mean" else 1
        return recursively_apply(lambda t: self.mesh.dp.all_reduce(t) * share, tensor, error_on_other_type=True)


def _all_tensors(value: Any) -> bool:
    try:
        recursively_apply(lambda t: t, value, error_on_other_type=True)
    except TypeError:
        return False
    return isinstance(value, (Tensor, list, tuple, dict))
