"""The settings of a training run, read from a DeepSpeed config.

Which keys are known, and what becomes of each, is said in `keys`; here their values are typed, checked against one
another and against the ranks.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, InstanceOf, StrictBool, StrictStr, ValidationError

from phalanx.config import ConfigError
from phalanx.layout.rules import PartitionConfig, RuleError
from phalanx.training.config_text import load_config
from phalanx.training.keys import ALIASES, AUTO_IS_DEFAULT, BLOCKS, HINTS, IMPLEMENTED, NAMES, REFUSED

_log = logging.getLogger(__name__)

_BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def _number(value: Any) -> Any:
    """JSON numbers only: a bool is no number, and neither is a text. 5e8 is an integer."""
    if isinstance(value, (bool, str)):
        raise ValueError("expected a number")
    return value


def _rules(value: Any) -> Any:
    """The user's rules; an empty object says nothing, as for DeepSpeed."""
    return None if value == {} else PartitionConfig.from_dict(value)


_Int = Annotated[int, BeforeValidator(_number)]
_Count = Annotated[_Int, Field(ge=1)]
_Float = Annotated[float, BeforeValidator(_number), Field(allow_inf_nan=False)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True, populate_by_name=True)


class ZeroConfig(_Section):
    """How optimizer state (1), gradients (2) and parameters (3) are sharded over the data-parallel ranks."""

    stage: Annotated[_Int, Field(ge=0, le=3)] = 0
    reduce_bucket_size: _Count = 500_000_000
    """Elements of a gradient bucket."""
    gather_16bit_weights_on_model_save: StrictBool = False


class BF16Config(_Section):
    """bfloat16 parameters with float32 master weights and moments."""

    enabled: StrictBool = False
    bf16_master_weights_and_grads: StrictBool = False
    """The parameters are their own master weights. Goes with `bf16_optimizer_states`: both or none."""
    bf16_optimizer_states: StrictBool = False


class FP16Config(_Section):
    """float16 parameters with float32 master weights and a loss scale."""

    enabled: StrictBool = False
    loss_scale: Annotated[_Float, Field(ge=0)] = 0.0
    """0: dynamic."""
    initial_scale_power: Annotated[_Int, Field(ge=0, le=127)] = 16
    loss_scale_window: _Count = 1000
    hysteresis: _Count = 2
    consecutive_hysteresis: StrictBool = False
    min_loss_scale: Annotated[_Float, Field(gt=0)] = 1.0


class DataTypesConfig(_Section):
    """Dtypes beside the parameters'."""

    grad_accum_dtype: Literal["fp32", "fp16", "bf16"] | None = None


class TPGroupConfig(_Section):
    """What older configs say of the tensor-parallel group: only checked."""

    tp_size: _Count = 1
    tp_group: Any = None


class TensorParallelConfig(_Section):
    """How the model is cut over ranks."""

    autotp_size: Annotated[_Int, Field(ge=0)] = 0
    """0 and 1: not cut."""
    partition_config: Annotated[InstanceOf[PartitionConfig] | None, BeforeValidator(_rules)] = None
    preset_model: StrictStr | None = None
    verify: Literal["error", "warn", "off"] | None = None
    """None: "error" for rules written by hand."""
    sequence_parallel: StrictBool = False
    gather_logits: StrictBool = False
    tp_overlap_comm: StrictBool = False
    tp: TPGroupConfig = TPGroupConfig()


class NamedConfig(_Section):
    """An optimizer or a schedule: its name and keyword arguments."""

    type: StrictStr
    params: dict[str, Any] = Field(default_factory=dict)


class TrainingConfig(_Section):
    """The settings of a training run; `read` makes one. Batch sizes are in samples, all three resolved."""

    train_batch_size: _Count
    train_micro_batch_size_per_gpu: _Count
    gradient_accumulation_steps: _Count
    gradient_clipping: Annotated[_Float, Field(ge=0)] = 0.0
    """Largest norm of the whole model's gradient; 0: off."""
    data_parallel_size: _Count
    dataloader_drop_last: StrictBool = False
    dump_state: StrictBool = False
    zero_allow_untested_optimizer: StrictBool = False
    optimizer: NamedConfig | None = None
    scheduler: NamedConfig | None = None
    bf16: BF16Config = BF16Config()
    fp16: FP16Config = FP16Config()
    data_types: DataTypesConfig = DataTypesConfig()
    zero: ZeroConfig = Field(default=ZeroConfig(), alias="zero_optimization")
    tensor_parallel: TensorParallelConfig = TensorParallelConfig()
    fused_kernels: StrictBool | None = None
    """Norms, gated MLPs and the loss by a kernel each; None: on GPUs where Triton is installed."""

    chunked_head: Annotated[_Int, Field(ge=0)] = 0
    """Tokens that have logits at a time in a training step; 0: all of them."""

    hints: tuple[str, ...] = ()
    """Keys that were given and have no effect here."""
    given: dict[Any, Any] = Field(default_factory=dict, repr=False)
    """A copy of the config as it was given."""

    @property
    def tp_size(self) -> int:
        """Ranks that the model is cut over, at least 1."""
        return max(1, self.tensor_parallel.autotp_size)

    @classmethod
    def read(
        cls, config: Mapping[str, Any] | str | os.PathLike[str], *, world_size: int, dp_size: int | None = None
    ) -> TrainingConfig:
        """Read a DeepSpeed config: a dict (never changed), the path of a JSON file, or JSON in base64.

        `world_size` is the number of ranks, `dp_size` those that see different data (default: `world_size` divided by
        `tensor_parallel.autotp_size`). Raises ConfigError (a ValueError) that lists every fault by the key's full path.
        """
        given = load_config(config)
        sorted_out = _SortedOut()
        sorted_out.take(given)
        values, problems = sorted_out.settings, sorted_out.problems
        tp_size = _tp_size(values)
        if dp_size is None:
            if world_size % tp_size:
                problems.append(
                    f"tensor_parallel.autotp_size={tp_size} does not divide the {world_size} ranks of this run"
                )
            dp_size = max(1, world_size // tp_size)
        elif dp_size * tp_size != world_size:
            problems.append(
                f"tensor_parallel.autotp_size={tp_size} x {dp_size} data-parallel ranks is not {world_size}"
            )
        if not problems or not any(problem.startswith("tensor_parallel.autotp_size") for problem in problems):
            problems += _check_dp(values, dp_size, world_size, tp_size) + _resolve_batch(values, dp_size)
        for name in (*_BATCH, "data_parallel_size"):
            values.setdefault(name, 1)  # a fault that is listed above
        try:
            read = cls(**values, hints=tuple(sorted_out.hints), given=given)
        except ValidationError as error:
            problems += _faults(error)
        else:
            problems += _contradictions(read)
        if problems:
            raise ConfigError("the training config cannot be used:\n" + "\n".join(f"  {line}" for line in problems))
        return read

    def log_hints(self) -> None:
        """Say once which of the given keys have no effect here."""
        if self.hints:
            _log.warning(
                "keys of the training config that have no effect here (docs/deepspeed.md says why): %s",
                ", ".join(self.hints),
            )


@dataclass
class _SortedOut:
    """A config, sorted by what becomes of each key."""

    settings: dict[str, Any] = field(default_factory=dict)
    hints: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    _spelled: dict[str, str] = field(default_factory=dict)

    def take(self, block: Mapping[str, Any], prefix: str = "") -> None:
        for key, value in block.items():
            path = f"{prefix}{key}"
            name = ALIASES.get(path, path)
            if name == "zero_optimization" and isinstance(value, bool):
                name, value = "zero_optimization.stage", int(value)
            if name in self._spelled:
                self.problems.append(f"{path}: the same key as {self._spelled[name]}; keep one")
            elif name in BLOCKS:
                self._spelled[name] = path
                if isinstance(value, Mapping):
                    self.take(value, f"{name}.")
                elif value is not None:
                    self.problems.append(f"{path}: expected an object, given {value!r}")
            else:
                self._spelled[name] = path
                self._leaf(name, path, value)

    def _leaf(self, name: str, path: str, value: Any) -> None:
        if name in IMPLEMENTED:
            if value == "auto" and isinstance(value, str):
                if name not in AUTO_IS_DEFAULT:
                    self.problems.append(f'{path}: "auto" is for a Trainer to fill in; give the value')
            elif value is not None:
                self.problems += [f'{path}.{key}: "auto" is for a Trainer to fill in' for key in _autos(value)]
                at = self.settings
                *parents, leaf = name.split(".")
                for parent in parents:
                    at = at.setdefault(parent, {})
                at[leaf] = value
        elif name in HINTS:
            if not _is_off(value):
                self.hints.append(path)
        elif name in REFUSED:
            if not REFUSED[name].accepts(value):
                refusal = REFUSED[name]
                self.problems.append(
                    f"{path}: not implemented, and leaving it out would not be what was asked for ({refusal.note}); "
                    f"remove it, or set it to {refusal.accepted.replace('`', '')}"
                )
        else:
            self.problems.append(f"{path}: unknown key; {_near(path)}")


def _autos(value: Any) -> list[str]:
    """The keys of a block of keyword arguments that are left to a Trainer."""
    return [key for key, item in value.items() if item == "auto"] if isinstance(value, Mapping) else []


def _is_off(value: Any) -> bool:
    """Whether a hint asks for nothing."""
    return value in (None, False, "auto") or (isinstance(value, Mapping) and value.get("enabled") is False)


def _near(path: str) -> str:
    """What an unknown key may have been meant to be."""
    names = [*NAMES, *ALIASES, *BLOCKS]
    near = get_close_matches(path, names, n=2, cutoff=0.75)
    # The right key in the wrong block, or a typo in the last part only.
    leaf = path.rpartition(".")[2]
    near += [name for name in names if name.rpartition(".")[2] == leaf and name not in near]
    siblings = [name for name in names if name.rpartition(".")[0] == path.rpartition(".")[0]]
    if not near:
        leaves = get_close_matches(leaf, [name.rpartition(".")[2] for name in siblings], n=2)
        near = [name for name in siblings if name.rpartition(".")[2] in leaves]
    if near:
        return f"did you mean {' or '.join(near[:3])}?"
    return "docs/deepspeed.md lists all that are known"


def _tp_size(values: Mapping[str, Any]) -> int:
    """autotp_size as far as it is a number; what is wrong with it is said when its type is checked."""
    size = values.get("tensor_parallel", {}).get("autotp_size", 0)
    return max(1, size) if isinstance(size, int) and not isinstance(size, bool) else 1


def _check_dp(values: dict[str, Any], dp_size: int, world_size: int, tp_size: int) -> list[str]:
    given = values.setdefault("data_parallel_size", dp_size)
    if given == dp_size or not isinstance(given, int):
        return []
    values["data_parallel_size"] = dp_size
    return [
        f"data_parallel_size: given {given}, but {world_size} ranks / autotp_size {tp_size} make {dp_size}; "
        "remove it or correct it"
    ]


def _resolve_batch(values: dict[str, Any], dp_size: int) -> list[str]:
    """Fill in what is missing of batch = micro batch x accumulation x DP. Returns the fault, if there is one."""
    batch: Any = values.get(_BATCH[0])
    micro: Any = values.get(_BATCH[1])
    steps: Any = values.get(_BATCH[2])
    if any(value is not None and (not isinstance(value, int) or value < 1) for value in (batch, micro, steps)):
        return []  # said when the types are checked
    if batch is None and micro is None:
        return ["train_batch_size or train_micro_batch_size_per_gpu must be given"]
    if steps is None:
        steps = 1 if batch is None or micro is None else batch // (micro * dp_size)
    if micro is None:
        micro = batch // (steps * dp_size)
    if batch is None:
        batch = micro * steps * dp_size
    if micro * steps * dp_size != batch:
        micro, steps = (values.get(name, "(any)") for name in _BATCH[1:])
        return [
            f"train_batch_size: {batch} is not train_micro_batch_size_per_gpu {micro} x gradient_accumulation_steps "
            f"{steps} x {dp_size} data-parallel ranks (tensor-parallel ranks see the same samples)"
        ]
    values.update(zip(_BATCH, (batch, micro, steps), strict=True))
    return []


def _faults(error: ValidationError) -> list[str]:
    lines = []
    for fault in error.errors():
        name = ".".join(str(part) for part in fault["loc"])
        if isinstance(cause := fault.get("ctx", {}).get("error"), RuleError):
            lines += [f"{name}: {problem.removeprefix('partition_config: ')}" for problem in cause.problems]
            continue
        lines.append(f"{name}: {fault['msg'].removeprefix('Value error, ')} (given {fault['input']!r})")
    return lines


def _contradictions(config: TrainingConfig) -> list[str]:
    problems = []
    narrow = {config.bf16.bf16_master_weights_and_grads, config.bf16.bf16_optimizer_states}
    if len(narrow) == 2 or (narrow == {True} and not config.bf16.enabled):
        problems.append(
            "bf16.bf16_master_weights_and_grads and bf16.bf16_optimizer_states: moments have the dtype of the master "
            "weights; set both, with bf16.enabled, or none"
        )
    if config.bf16.enabled and config.fp16.enabled:
        problems.append("bf16.enabled and fp16.enabled: parameters have one dtype; enable one of them")
    older = config.tensor_parallel.tp.tp_size
    if older not in (1, config.tp_size):
        problems.append(
            f"tensor_parallel.tp.tp_size: {older} is not tensor_parallel.autotp_size "
            f"({config.tensor_parallel.autotp_size}), which is the one that cuts the model"
        )
    return problems
