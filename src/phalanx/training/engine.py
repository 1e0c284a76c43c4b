"""The training engine: forward, backward, step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from phalanx.distributed.mesh import Mesh
from phalanx.parallel.registry import LayoutRegistry
from phalanx.training.agreement import Agreement, check_not_empty
from phalanx.training.blocks import blocks
from phalanx.training.checkpoints import Checkpoints
from phalanx.training.exports import Exports
from phalanx.training.fragments import Fragment
from phalanx.training.mpu import MeshUnit
from phalanx.training.norm import GradientNorm, clip_coefficient, scale_gradients
from phalanx.training.precision import LossScale, Precision
from phalanx.training.repoint import OwnedStep, check_optimizer, names_by_group, repoint
from phalanx.training.sdpa import fastest_attention
from phalanx.training.setup import make_equal, place, select, shard
from phalanx.training.shards import Shards


class TrainingEngine(Checkpoints, Exports):
    """Trains `module` on a mesh of ranks: `loss = engine(...).loss; engine.backward(loss); engine.step()`.

    `module`: already cut over `mesh.tp` (`parallelize(..., sum_gradients=False)`); `registry`: its layouts, or
    `LayoutRegistry.whole(module)`. `optimizer`: a new torch optimizer over the module's parameters; it is moved in
    place to what this rank owns and keeps its param groups. None: the engine only evaluates. `lr_scheduler`: stepped
    after each update, may be None. `config`: a TrainingConfig. `mpu`: what the user passed; None makes one of the mesh.

    All ranks of a TP group pass the same batches; every DP rank passes its own. Gradients are the mean over the DP
    ranks; a parameter that a step does not use counts as having a gradient of zeros. Raises ValueError at setup for
    what cannot be trained as configured.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        config: Any,
        mesh: Mesh,
        registry: LayoutRegistry,
        optimizer: Optimizer | None = None,
        lr_scheduler: Any = None,
        mpu: Any = None,
    ) -> None:
        self.module = module
        self.config = config
        self.mesh = mesh
        self.device = mesh.device
        self.registry = registry
        self.optimizer = optimizer
        self.lr_scheduler = lr_scheduler
        self.mpu = MeshUnit(mesh) if mpu is None else mpu
        self.micro_steps = 0
        self.global_steps = 0
        self.skipped_steps = 0
        self.loss_scaler = LossScale.of(config)
        self._boundary: bool | None = None
        self._syncing = True
        self._has_gradients = False
        self._applied = False
        self._norm: Tensor | None = None

        precision = Precision.of(config)
        precision.check(module)
        self.compute_dtype = precision.compute
        place(module, mesh)
        self._agreement = Agreement(module, mesh)
        trained: dict[str, nn.Parameter] = {}
        groups: list[list[str]] = []
        if optimizer is not None:
            check_optimizer(
                optimizer,
                stage=config.zero.stage,
                tp_size=mesh.tp.size,
                allow_untested=config.zero_allow_untested_optimizer,
            )
            trained = select(module, optimizer, registry)
            groups = names_by_group(optimizer, trained)
        make_equal(module, trained, mesh)
        self._shards = shard(module, trained, config=config, mesh=mesh, registry=registry, precision=precision)
        self._measure = GradientNorm(self._shards.fragments, mesh, sharded=self._shards.sharded)
        self._frozen = {name: p for name, p in module.named_parameters() if not p.requires_grad}
        self._known = dict(module.named_parameters()).keys()
        self._trained = list(trained)
        self._update: OwnedStep | None = None
        if optimizer is not None:
            repoint(optimizer, groups, self._shards.fragments)
            self._update = OwnedStep(optimizer)

    # The loop.

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's output.

        Raises RuntimeError, on all ranks of a TP group, where they are given inputs of different structure or shape,
        or have different random states; ValueError for an empty batch.
        """
        given = self._agreement.before_forward(args, kwargs)
        check_not_empty(args, kwargs)
        with fastest_attention(self.device):
            output = self.module(*args, **kwargs)
        self._agreement.after_forward(given)
        return output

    def backward(self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Tensor:
        """Add the gradients of `loss` (one number) to those of this step; returns `loss`.

        The loss is divided by the accumulation steps, unless `scale_wrt_gas` is False. In the last pass of a step the
        sums over the DP ranks start while the pass still runs. After an error all gradients of the step are gone.
        """
        self._training()
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
            given = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise ValueError(f"backward() needs a loss that is one number and requires a gradient, not {given}")
        factor = self.loss_scaler.scale / (self.gradient_accumulation_steps() if scale_wrt_gas else 1)
        self._shards.begin(reduce=self._syncing and self.is_gradient_accumulation_boundary())
        try:
            wide = loss.float() if loss.dtype in (torch.float16, torch.bfloat16) else loss
            (wide if factor == 1 else wide * factor).backward(retain_graph=retain_graph)
            self._shards.end()
        except BaseException:
            self.zero_grad()
            raise
        self._has_gradients = True
        return loss

    def step(self) -> None:
        """End a pass; at the boundary of accumulation also: sum, clip, update, and start over.

        Raises RuntimeError without a backward pass since the last update, and, on all ranks of a TP group, where any
        input since then differed between them; nothing is updated then, and the gradients of the step are gone.
        """
        update = self._training()
        boundary = self.is_gradient_accumulation_boundary()
        self.micro_steps += 1
        self._applied = False
        if not boundary:
            return
        if not self._has_gradients:
            raise RuntimeError("step() without a backward pass: call engine.backward(loss) first")
        self._check_frozen()
        try:
            self._agreement.before_update()
        except RuntimeError:
            self.zero_grad()
            raise
        self._shards.finish()
        scale = self._shards.scale / self.loss_scaler.scale
        self._norm = self._measure() * scale
        self._applied = not self.loss_scaler.skips(self._norm)
        if self._applied:
            scale_gradients(self._shards.fragments, clip_coefficient(self._norm, self.config.gradient_clipping) * scale)
            update()
            self._shards.publish()
            if self.lr_scheduler is not None:
                self.lr_scheduler.step()
        else:
            self.skipped_steps += 1
        self.global_steps += 1
        self.zero_grad()
        self.loss_scaler.update(overflow=not self._applied)

    def zero_grad(self) -> None:
        """Forget the gradients of this step."""
        self._shards.discard()
        self._has_gradients = False

    def train(self, mode: bool = True) -> Self:
        """Set the module to training (or evaluation) mode."""
        self.module.train(mode)
        self._agreement.refresh()
        return self

    def eval(self) -> Self:
        """Set the module to evaluation mode."""
        return self.train(False)

    # Accumulation.

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the next `step` updates: every `gradient_accumulation_steps` passes, or what was set."""
        if self._boundary is not None:
            return self._boundary
        return (self.micro_steps + 1) % self.gradient_accumulation_steps() == 0

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Say from now on whether the current pass is the last of its step, instead of counting passes."""
        self._boundary = is_boundary

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within it, backward passes leave the sums over DP ranks to a later pass, or to `step`.

        Raises RuntimeError at ZeRO stages 2 and 3, which sum in every pass.
        """
        if self.zero_optimization_stage() >= 2:
            raise RuntimeError(
                f"no_sync() at ZeRO stage {self.zero_optimization_stage()}: from stage 2 on, gradients are summed over "
                "the ranks in every pass; use stage 0 or 1, or leave no_sync() out"
            )
        syncing, self._syncing = self._syncing, False
        try:
            yield
        finally:
            self._syncing = syncing

    # What a caller may ask.

    def train_batch_size(self) -> int:
        """Samples of one update, over all DP ranks."""
        return int(self.config.train_batch_size)

    def train_micro_batch_size_per_gpu(self) -> int:
        """Samples of one pass of one DP rank."""
        return int(self.config.train_micro_batch_size_per_gpu)

    def gradient_accumulation_steps(self) -> int:
        """Passes of one update."""
        return int(self.config.gradient_accumulation_steps)

    def get_global_grad_norm(self) -> float | None:
        """The norm of the last step's mean gradient before clipping, over the whole model; None before a step."""
        return None if self._norm is None else float(self._norm)

    def get_lr(self) -> list[float]:
        """The learning rate of each param group."""
        return [] if self.optimizer is None else [group["lr"] for group in self.optimizer.param_groups]

    def was_step_applied(self) -> bool:
        """Whether the last `step` changed the parameters: it was at a boundary, and not skipped for an overflow."""
        return self._applied

    @property
    def loss_scale(self) -> float:
        """The factor on losses; 1 unless fp16."""
        return self.loss_scaler.scale

    def zero_optimization_stage(self) -> int:
        """The ZeRO stage of the config."""
        return int(self.config.zero.stage)

    def zero_gather_16bit_weights_on_model_save(self) -> bool:
        """What the config says of saving at stage 3."""
        return bool(self.config.zero.gather_16bit_weights_on_model_save)

    def autotp_size(self) -> int:
        """Ranks of a TP group, as the config says it (0: none)."""
        return int(self.config.tensor_parallel.autotp_size)

    # State.

    @property
    def fragments(self) -> Sequence[Fragment]:
        """What this rank updates; `optimizer.state[fragment.tensor]` is the state of each."""
        return self._shards.fragments

    def refresh_parameters(self) -> None:
        """After `fragment.tensor`s were changed (a checkpoint was loaded): bring the parameters of all ranks up to
        date. Called by all ranks."""
        self._shards.publish()

    @property
    def fragments_are_shared_out(self) -> bool:
        """Whether each data-parallel rank owns its own elements; if not, all of them own all."""
        return self._shards.sharded

    @property
    def trained_names(self) -> frozenset[str]:
        """The parameters that the optimizer updates."""
        return frozenset(self._trained)

    def shards(self) -> Shards:
        """The weights as they lie on the ranks: name -> (how it is cut over `mesh.tp`, this rank's shard). They go to
        an engine that serves with `llm.update_weights(engine.shards(), engine.mesh.tp)`."""
        return Shards(self)

    def module_state_dict(self) -> dict[str, Any]:
        """The module's state: of this TP rank its shards, whole over the DP ranks. Called by all ranks."""
        return self._shards.whole(self.module.state_dict())

    def whole_over_copies(self, name: str, value: Tensor) -> Tensor:
        """A tensor of `module.state_dict()`, whole over the DP ranks, in the dtype that the model computes in. Called
        by all ranks."""
        found: Tensor = self._shards.whole({name: value})[name]
        return found

    def compile(
        self, backend: Any = "inductor", compile_kwargs: dict[str, Any] | None = None, *, whole: bool = False
    ) -> None:
        """Compile the module in place by `torch.compile(..., backend=backend, **compile_kwargs)`: its blocks, all of
        them in the time of one, or its `whole` forward."""
        for part in [self.module] if whole else blocks(self.module):
            part.compile(backend=backend, **(compile_kwargs or {}))

    def destroy(self) -> None:
        """Take all hooks off the module and let the buffers go; the module keeps its parameters.

        Waits for a checkpoint that is being written, and raises then what went wrong with it.
        """
        self._shards.destroy()
        self._agreement.close()
        if self._update is not None:
            self._update.release()
            self._update = None
        self.wait_for_checkpoint()

    def _check_frozen(self) -> None:
        now = dict(self.module.named_parameters())
        if now.keys() != self._known or any(not now[name].requires_grad for name in self._trained):
            frozen = [name for name in self._trained if name in now and not now[name].requires_grad]
            other = sorted(now.keys() ^ self._known)
            what = f"{frozen[0]} was frozen" if frozen else f"{other[0] if other else 'a parameter'} came or went"
            raise RuntimeError(
                f"after the engine was made, {what}: what an engine trains is settled when it is made. Freeze and add "
                "parameters before, or make a new engine"
            )
        thawed = [name for name, parameter in self._frozen.items() if parameter.requires_grad]
        if thawed:
            raise RuntimeError(
                f"{len(thawed)} parameters were frozen when the engine was made and now require a gradient, the first "
                f"is {thawed[0]}: they would not be trained. Set requires_grad before, or make a new engine"
            )

    def _training(self) -> OwnedStep:
        if self._update is None:
            raise RuntimeError("this engine has no optimizer (or was destroyed): pass one to train")
        return self._update
