"""What transformers and accelerate call on DeepSpeed under `TrainingArguments(deepspeed=...)`, for the package `shim/`.

They treat DeepSpeed's engine as a module and as an engine, and its config as a dict; and they fill in a few values that
hold for data parallelism only.
"""

from __future__ import annotations

import types
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from phalanx.training import deepspeed
from phalanx.training.config_text import load_config
from phalanx.training.engine import TrainingEngine
from phalanx.training.hf_config import tp_size_of
from phalanx.training.trained_model import TrainedModel


class DeepSpeedEngine(TrainedModel):
    """An engine that is a module as well; what a module has not is the engine's. `config`: the dict that was given."""

    def __init__(self, engine: TrainingEngine) -> None:
        super().__init__(engine)
        self.config: dict[Any, Any] = engine.config.given

    def _zero3_consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Tensor] | None:
        """DeepSpeed's name for it at stage 3."""
        state: dict[str, Tensor] | None = self.engine._consolidated_16bit_state_dict(exclude_frozen_parameters)
        return state

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "_held":
                raise
            return getattr(self.engine, name)


class EngineOptimizer:
    """The engine's optimizer, which also says whether the last update was skipped."""

    def __init__(self, engine: TrainingEngine) -> None:
        self._engine = engine

    @property
    def overflow(self) -> bool:
        """Whether the last step of the engine has changed nothing."""
        return self._engine.global_steps > 0 and not self._engine.was_step_applied()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine.optimizer, name)


def initialize(
    args: Any = None, model: Any = None, *, config: Any = None, config_params: Any = None, **kwargs: Any
) -> tuple[DeepSpeedEngine, Any, Any, Any]:
    """`phalanx.initialize` with a config that accelerate has filled in."""
    if config is not None and config_params is not None:
        raise ValueError("a DeepSpeed config was given by config and by config_params; give one")
    given = config if config_params is None else config_params
    if given is not None:
        given = _as_meant(load_config(given))
    engine, optimizer, loader, schedule = deepspeed.initialize(args, model, config=given, **kwargs)
    module: Any = engine.module
    if hasattr(module, "save_pretrained"):
        module.save_pretrained = types.MethodType(_save_pretrained, module)
    stepped = None if optimizer is None else EngineOptimizer(engine)
    return DeepSpeedEngine(engine), stepped, loader, schedule


def _as_meant(config: dict[str, Any]) -> dict[str, Any]:
    """Without what accelerate writes for its own sake.

    Its train_batch_size counts tensor-parallel ranks as if each saw other samples. And it allows any optimizer, without
    having been asked: one that needs whole matrices would silently be given parts of them.
    """
    micro, steps = (config.get(key) for key in ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps"))
    world = dist.get_world_size() if dist.is_initialized() else 1
    counted = micro * steps * world if isinstance(micro, int) and isinstance(steps, int) else None
    if tp_size_of(config) > 1 and counted is not None and config.get("train_batch_size") == counted:
        del config["train_batch_size"]
    config.pop("zero_allow_untested_optimizer", None)
    return config


def _save_pretrained(model: Any, *args: Any, state_dict: Mapping[str, Tensor] | None = None, **kwargs: Any) -> Any:
    """The class's own, of whole weights that the caller has gathered."""
    if state_dict is None:
        raise RuntimeError(
            "save_pretrained of a model that is trained would write what one rank holds: use the Trainer's save_model, "
            "or engine.save_pretrained"
        )
    return type(model).save_pretrained(model, *args, state_dict=state_dict, **kwargs)


def clone_tensors_for_torch_save(item: Any, device: Any = "cpu") -> Any:
    """Tensors on `device` that share no memory with others, in containers like those they are in."""
    if isinstance(item, Tensor):
        return item.detach().clone().to(device)
    if isinstance(item, Mapping):
        return {key: clone_tensors_for_torch_save(value, device) for key, value in item.items()}
    if isinstance(item, (list, tuple)):
        return type(item)(clone_tensors_for_torch_save(value, device) for value in item)
    return item


class GatheredParameters:
    """`with GatheredParameters(params, modifier_rank=0):` for parameters that no engine has sharded: they are whole.

    At the end, what `modifier_rank` has written goes to all ranks. None among `params` (a bias that is not there) is
    passed over. Raises ValueError for sharded parameters.
    """

    def __init__(
        self, params: nn.Parameter | Iterable[nn.Parameter | None], modifier_rank: int | None = None, **_: Any
    ) -> None:
        given = [params] if isinstance(params, Tensor) else params
        self._params = [parameter for parameter in given if parameter is not None]
        self._modifier = modifier_rank
        if any(isinstance(parameter, DTensor) for parameter in self._params):
            raise ValueError("these parameters are sharded by an engine: use `with engine.gathered_parameters(names)`")

    def __enter__(self) -> None: ...

    def __exit__(self, *error: Any) -> None:
        if self._modifier is None or not dist.is_initialized():
            return
        with torch.no_grad():
            for parameter in self._params:
                # NCCL alone cannot send what a CPU holds.
                sent = parameter.data.cuda() if torch.cuda.is_available() else parameter.data
                dist.broadcast(sent, self._modifier)
                parameter.data.copy_(sent)
