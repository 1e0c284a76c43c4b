"""What a caller says of the groups of ranks, checked against the ranks of the mesh.

DeepSpeed takes the number of data-parallel ranks from an `mpu` and makes its own groups all the same; where the two
differ it trains on something that nobody has described.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

_RECORD = "_phalanx_tp_model_init"


@dataclass(frozen=True)
class Ranks:
    """Which global ranks this rank shares a model with (`tp`), and holds the same shards as (`dp`)."""

    tp: tuple[int, ...]
    dp: tuple[int, ...]

    @classmethod
    def of(cls, rank: int, world: int, tp_size: int) -> Ranks:
        """As `Mesh.build` places them: tensor-parallel ranks are consecutive."""
        start = rank - rank % tp_size
        return cls(tuple(range(start, start + tp_size)), tuple(range(rank % tp_size, world, tp_size)))


def check_mpu(mpu: Any, ranks: Ranks) -> None:
    """Raises ValueError where a model-parallel unit describes other groups. What it does not offer is not checked."""
    for side, names in (
        (ranks.tp, ("model_parallel", "tensor_model_parallel")),
        (ranks.dp, ("data_parallel",)),
    ):
        for name in names:
            size = _ask(mpu, f"get_{name}_world_size")
            if size is not None and size != len(side):
                raise ValueError(
                    f"mpu.get_{name}_world_size() is {size}, but tensor_parallel.autotp_size and the ranks of this run "
                    f"make it {len(side)}; correct one of them"
                )
            place = _ask(mpu, f"get_{name}_rank")
            if place is not None and place != side.index(_own_rank()):
                raise ValueError(
                    f"mpu.get_{name}_rank() is {place}, but this rank is number {side.index(_own_rank())} of "
                    f"{list(side)}; {_PLACEMENT}"
                )
            check_group(_ask(mpu, f"get_{name}_group"), side, f"mpu.get_{name}_group()")
    for name in ("pipe_parallel", "sequence_parallel", "expert_parallel"):
        size = _ask(mpu, f"get_{name}_world_size")
        if size not in (None, 1):
            raise ValueError(f"mpu.get_{name}_world_size() is {size}: only tensor and data parallelism are supported")


_PLACEMENT = "ranks of one tensor-parallel group are consecutive: with autotp_size 2, [0, 1], [2, 3], ..."


def check_group(group: Any, expected: Sequence[int], name: str) -> None:
    """Raises ValueError if a process group holds other ranks than `expected`."""
    if not isinstance(group, dist.ProcessGroup):
        return
    given = dist.get_process_group_ranks(group)
    if sorted(given) != sorted(expected):
        raise ValueError(f"{name} holds the ranks {given}, expected {list(expected)}; {_PLACEMENT}")


def _ask(mpu: Any, name: str) -> Any:
    method = getattr(mpu, name, None)
    return method() if callable(method) else None


def _own_rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


@dataclass(frozen=True)
class TPRequest:
    """What `tp_model_init` was told. `group`: the global ranks of a `tp_group`."""

    tp_size: int
    dtype: torch.dtype | None
    group: tuple[int, ...] | None

    def record(self, model: nn.Module) -> None:
        """Keep this with the model, for the next `initialize`. Raises ValueError if the model holds another one."""
        held = next((vars(module)[_RECORD] for module in model.modules() if _RECORD in vars(module)), self)
        if held != self:
            raise ValueError(
                "Conflicting tp_model_init arguments detected across multiple calls: this model was given "
                f"{held}, now {self}"
            )
        vars(model)[_RECORD] = self

    @staticmethod
    def take(model: nn.Module) -> TPRequest | None:
        """What was recorded for the model or, since it may have been wrapped, a part of it; then it is gone."""
        found = [vars(module).pop(_RECORD) for module in model.modules() if _RECORD in vars(module)]
        if any(request != found[0] for request in found):
            raise ValueError(f"Conflicting tp_model_init arguments for parts of one model: {found}")
        return found[0] if found else None

    def merge_into(self, config: dict[str, Any]) -> None:
        """Fill in what `config` (changed here) does not say. Raises ValueError where it says otherwise."""
        section = config["tensor_parallel"] = {} if (held := config.get("tensor_parallel")) is None else held
        if not isinstance(section, dict):
            return  # refused when the config is read
        given = section.setdefault("autotp_size", self.tp_size)
        if given != self.tp_size:
            raise ValueError(
                f"Conflicting tensor_parallel.autotp_size in config ({given}) and tp_model_init ({self.tp_size})"
            )
        for key, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
            block = config.get(key)
            if isinstance(block, dict) and block.get("enabled") is True and self.dtype not in (None, dtype):
                raise ValueError(
                    f"Conflicting dtype: config uses {dtype} ({key}.enabled) but tp_model_init requested {self.dtype}"
                )
