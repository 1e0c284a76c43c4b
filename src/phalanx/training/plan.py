"""What a training run would take on each rank: how its model is cut, and the bytes of what its parameters carry.

Weights, gradients, master weights and optimizer state as the engine of this package holds them in a step (`zero`,
`fsdp`). What a forward keeps for its backward pass depends on the batch and is not part of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from phalanx.config import ConfigError, parse_dtype
from phalanx.parallel.plan import ModelPlan, plan_model
from phalanx.parallel.verify import Verdict, VerificationError, trial
from phalanx.training.config import TrainingConfig
from phalanx.training.config_text import load_config
from phalanx.training.fsdp import layers
from phalanx.training.optimizers import optimizer_maker
from phalanx.training.precision import Precision
from phalanx.training.zero import IN_FLIGHT

_BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
_NARROW: dict[torch.dtype, str] = {torch.bfloat16: "bf16", torch.float16: "fp16"}


@dataclass(frozen=True)
class RankMemory:
    """Bytes on one rank.

    weights     what the model computes with. ZeRO 3: the outermost parameters and two layers (one is gathered while the
                other computes), and with fp32 parameters the rank's shards.
    gradients   at their most, when a step's last backward pass ends.
    in_flight   buckets whose sums are under way (ZeRO 3: the gradient of one layer), when they are at their most.
    masters     the fp32 values that the optimizer updates; 0 where it updates the weights themselves.
    moments     the optimizer's state.
    """

    rank: int
    parameters: int
    weights: int
    gradients: int
    in_flight: int
    masters: int
    moments: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.gradients + self.in_flight + self.masters + self.moments


@dataclass(frozen=True)
class TrainingPlan:
    """`optimizer` is the config's or, where that leaves it to the script, AdamW (`assumed`).

    `dtype` is what the model computes in. `verdict`: what came of a trial of the rules, None if there was none.
    """

    model: ModelPlan
    dp_size: int
    stage: int
    dtype: torch.dtype
    accumulation_steps: int
    optimizer: str
    assumed: bool
    memory: tuple[RankMemory, ...]
    verdict: Verdict | None


def plan_settings(
    config: Any = None,
    *,
    tp_size: int | None = None,
    dp_size: int | None = None,
    stage: int | None = None,
    dtype: str | None = None,
) -> TrainingConfig:
    """The settings of a run: those of a DeepSpeed config (a dict, a path or base64), the given ones in their place.

    Without a config: bfloat16 with fp32 master weights, ZeRO 0. Without `dp_size`: what the config's batch sizes or its
    data_parallel_size make, else 1. What a Trainer fills in (`"auto"`) is taken as not given.

    Raises:
        ConfigError: every fault of the config by the key's full path, or a dtype other than float32, bfloat16, float16.
    """
    given: dict[str, Any] = {"bf16": {"enabled": True}} if config is None else load_config(config)
    if dtype is None and "auto" in [_block(given, name).get("enabled") for name in ("bf16", "bfloat16", "fp16")]:
        raise ConfigError('the config leaves its dtype to a Trainer ("auto"): say which it will be')
    given = _without_auto(given)
    if dtype is not None:
        _set_dtype(given, parse_dtype(dtype))
    if stage is not None:
        given["zero_optimization"] = {**_block(given, "zero_optimization"), "stage": stage}
    if tp_size is not None:
        given["tensor_parallel"] = {**_block(given, "tensor_parallel"), "autotp_size": tp_size}
    sizes = [given.get(name) for name in _BATCH]
    if sizes[0] is None and sizes[1] is None:
        given["train_micro_batch_size_per_gpu"] = 1
    if dp_size is None:
        dp_size = _dp_size(given, sizes)
    cut = _block(given, "tensor_parallel").get("autotp_size", 0)
    world = dp_size * max(1, cut if isinstance(cut, int) else 1)
    return TrainingConfig.read(given, world_size=world, dp_size=dp_size)


def plan_training(
    model: nn.Module, settings: TrainingConfig, *, verify: Literal["error", "warn", "off"] | None = None
) -> TrainingPlan:
    """What a run with `settings` would take; `model` is on the meta device, and is cut by it.

    `verify`: try the rules on a small model. "error" refuses wrong ones, "warn" tells of them in the verdict. Default:
    the config's, else "error" for rules that the user wrote and "warn" for others.

    Raises:
        RuleError: rules that do not fit the model.
        VerificationError: rules that compute another function.
        ValueError: what cannot be cut.
    """
    rules = settings.tensor_parallel
    parts = _gathered_together(model)
    plan = plan_model(
        model,
        settings.tp_size,
        config=rules.partition_config,
        preset=rules.preset_model,
        sequence_parallel=rules.sequence_parallel,
    )
    action = verify or rules.verify or ("error" if plan.hand_written else "warn")
    verdict = None
    if action != "off" and plan.tp_size > 1:
        verdict = trial(
            model,
            plan.tp_size,
            config=rules.partition_config,
            preset=rules.preset_model,
            sequence_parallel=rules.sequence_parallel,
        )
        if verdict.fault and verdict.tried and action == "error":
            raise VerificationError(verdict.fault)
    named = settings.optimizer
    held = _Held(plan, parts, settings)
    return TrainingPlan(
        model=plan,
        dp_size=settings.data_parallel_size,
        stage=settings.zero.stage,
        dtype=held.compute,
        accumulation_steps=settings.gradient_accumulation_steps,
        optimizer="AdamW" if named is None else named.type,
        assumed=named is None,
        memory=tuple(held.by(rank) for rank in range(plan.tp_size)),
        verdict=verdict,
    )


class _Held:
    """What ranks hold in a step."""

    def __init__(self, plan: ModelPlan, parts: list[list[str]], settings: TrainingConfig) -> None:
        precision = Precision.of(settings)
        self.plan = plan
        self.parts = parts
        self.dp = settings.data_parallel_size
        # With one DP rank there is nothing to share out, and stage 3 is stage 2.
        self.stage = settings.zero.stage if self.dp > 1 else min(settings.zero.stage, 2)
        self.bucket = settings.zero.reduce_bucket_size
        self.passes = settings.gradient_accumulation_steps
        self.compute = precision.param_dtype(torch.float32)
        self.mixed = precision.compute is not None
        self._width = self.compute.itemsize
        self._master = precision.master_dtype(torch.float32).itemsize
        self._gradient = precision.gradient_dtype(torch.float32, held=self.stage != 2).itemsize
        self._reduce = (precision.reduce_dtype() or self.compute).itemsize
        self._states = _states(settings)

    def by(self, rank: int) -> RankMemory:
        whole = self.plan.held(rank)
        # What this rank owns of it, for the optimizer.
        own = -(-whole // self.dp) if self.stage else whole
        weights, gradients, in_flight = self._gathered(rank, own) if self.stage == 3 else self._in_buckets(whole, own)
        return RankMemory(
            rank,
            parameters=whole,
            weights=weights,
            gradients=gradients,
            in_flight=in_flight,
            masters=own * self._master if self.mixed else 0,
            moments=round(own * self._master * self._states),
        )

    def _in_buckets(self, whole: int, own: int) -> tuple[int, int, int]:
        reduced = own * self._master
        if self.stage != 2 and self.passes > 1:
            # Summed here over the passes; each bucket's sum takes its place.
            return whole * self._width, max(whole * self._gradient, reduced), 0
        # One is being filled, others travel. Where they are kept as they come they are what is counted already.
        kept = own == whole and self._gradient == self._master
        travelling = 0 if kept else min(whole, (IN_FLIGHT + 1) * self.bucket) * self._gradient
        return whole * self._width, reduced, travelling

    def _gathered(self, rank: int, own: int) -> tuple[int, int, int]:
        root, *layers = [sum(self.plan.held_of(name, rank) for name in names) for names in self.parts]
        shards = 0 if self.mixed else own * self._width
        gathered = (root + sum(sorted(layers)[-2:])) * self._width
        return shards + gathered, own * self._master, max(root, *layers, 0) * (self._width + self._reduce)


def _gathered_together(model: nn.Module) -> list[list[str]]:
    """The names of the parameters that ZeRO 3 gathers at a time: those outside of the layers first."""
    ids = {id(parameter): name for name, parameter in model.named_parameters()}
    inside = [[ids.pop(id(parameter)) for parameter in layer.parameters()] for layer in layers(model)]
    return [list(ids.values()), *inside]


def _states(settings: TrainingConfig) -> float:
    """Elements that the optimizer keeps for each one of a parameter: it is asked to make a step."""
    named = settings.optimizer
    params = {} if named is None else named.params
    # They choose how the same step is computed, some of them on a GPU only.
    params = {key: value for key, value in params.items() if key not in ("fused", "foreach", "capturable")}
    parameter = nn.Parameter(torch.zeros(64))
    parameter.grad = torch.zeros(64)
    optimizer = optimizer_maker("AdamW" if named is None else named.type, params)([parameter])
    optimizer.step()
    kept = [value for value in optimizer.state[parameter].values() if isinstance(value, torch.Tensor)]
    return sum(value.numel() for value in kept if value.shape == parameter.shape) / parameter.numel()


def _block(given: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A block of a config; empty where it is none."""
    found = given.get(name)
    return found if isinstance(found, Mapping) else {}


def _without_auto(given: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: _without_auto(value) if isinstance(value, Mapping) else value
        for key, value in given.items()
        if not (isinstance(value, str) and value == "auto")
    }


def _set_dtype(given: dict[str, Any], dtype: torch.dtype) -> None:
    if dtype is not torch.float32 and dtype not in _NARROW:
        raise ConfigError(f"dtype {dtype}: a model is trained in float32, bfloat16 or float16")
    if "bfloat16" in given:
        given.setdefault("bf16", given.pop("bfloat16"))
    for each, name in _NARROW.items():
        if each is dtype or name in given:
            given[name] = {**_block(given, name), "enabled": each is dtype}


def _dp_size(given: Mapping[str, Any], sizes: list[Any]) -> int:
    said = given.get("data_parallel_size")
    if isinstance(said, int) and said > 0:
        return said
    if all(isinstance(size, int) and size > 0 for size in sizes):
        batch, micro, steps = sizes
        return max(1, batch // (micro * steps))
    return 1
