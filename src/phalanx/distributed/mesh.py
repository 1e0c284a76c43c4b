"""The ranks of a training run as a grid: tensor parallelism along one side, data parallelism along the other.

Built on the default process group of `torch.distributed`, which the user (or `init_distributed`) has made. TP ranks
are consecutive, so that they share a machine; DP ranks are strided: with TP 2 on 4 ranks, TP [0, 1] and [2, 3], DP
[0, 2] and [1, 3].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor

from phalanx.distributed.group import (
    Group,
    Pending,
    Reduction,
    SoloGroup,
    check_source,
    gather_sizes,
    own_payload,
    scatter_range,
)

# Their names since PyTorch 2.13, and those before.
_gather_into: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter_into: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_gather_single: Any = getattr(functional, "all_gather_single", None) or functional.all_gather_tensor
_scatter_single: Any = getattr(functional, "reduce_scatter_single", None) or functional.reduce_scatter_tensor


class TorchGroup(Group):
    """One rank of a process group of `torch.distributed`. Its collectives may be traced by `torch.compile`.

    Errors are those of `torch.distributed`; its own timeouts and watchdogs apply.
    """

    def __init__(self, process_group: dist.ProcessGroup) -> None:
        self.process_group = process_group
        self.rank = process_group.rank()
        self.size = process_group.size()
        self._options = {"sum": _options(dist.ReduceOp.SUM), "max": _options(dist.ReduceOp.MAX)}
        self._beside = _options(dist.ReduceOp.SUM, beside=True)

    def all_reduce(self, t: Tensor, op: Reduction = "sum") -> Tensor:
        mine = t.detach()
        if torch.compiler.is_compiling():
            return functional.wait_tensor(functional.all_reduce(mine.contiguous(), op, self.process_group))
        out = mine.clone(memory_format=torch.contiguous_format)
        # What `dist.all_reduce` does, without its checks and logs: a forward calls this several times a layer.
        work = self.process_group.allreduce([out], self._options[op])
        if work is not None:
            work.wait()
        return out

    def start_all_reduce(self, t: Tensor) -> Pending:
        out = t.detach().contiguous()
        work = self.process_group.allreduce([out], self._beside)
        return _Started(work, out)

    def all_gather(self, t: Tensor, dim: int = 0, sizes: Sequence[int] | None = None) -> Tensor:
        dim, sizes = gather_sizes(self, t, dim, sizes)
        mine = t.detach()
        if min(sizes) == max(sizes):
            gathered = self._gather_rows(mine.contiguous())
            return gathered if dim == 0 else torch.cat(gathered.chunk(self.size), dim)
        # The back ends gather equal parts: pad to the widest, cut afterwards.
        if mine.shape[dim] < max(sizes):
            missing = [*mine.shape[:dim], max(sizes) - mine.shape[dim], *mine.shape[dim + 1 :]]
            mine = torch.cat([mine, mine.new_zeros(missing)], dim)
        parts = self._gather_rows(mine.contiguous()).chunk(self.size)
        return torch.cat([part.narrow(dim, 0, n) for part, n in zip(parts, sizes, strict=True)], dim)

    def _gather_rows(self, t: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            return functional.wait_tensor(_gather_single(t, 0, self.process_group))
        out = t.new_empty(self.size * t.shape[0], *t.shape[1:])
        _gather_into(out, t, self.process_group)
        return out

    def reduce_scatter(self, t: Tensor, dim: int = 0, sizes: Sequence[int] | None = None) -> Tensor:
        start, length = scatter_range(self, t, dim, sizes)
        if length * self.size != t.shape[dim] or (sizes is not None and min(sizes) != max(sizes)):
            return self.all_reduce(t).narrow(dim, start, length).contiguous()
        mine = (t.detach() if dim == 0 else torch.cat(t.detach().chunk(self.size, dim))).contiguous()
        if torch.compiler.is_compiling():
            return functional.wait_tensor(_scatter_single(mine, "sum", 0, self.process_group))
        out = mine.new_empty(mine.shape[0] // self.size, *mine.shape[1:])
        _scatter_into(out, mine, dist.ReduceOp.SUM, self.process_group)
        return out

    def start_reduce_scatter(self, t: Tensor, dim: int, sizes: Sequence[int]) -> Pending:
        start, length = scatter_range(self, t, dim, sizes)
        if min(sizes) != max(sizes):
            whole = self.start_all_reduce(t)
            return lambda: whole().narrow(dim, start, length).contiguous()
        mine = (t.detach() if dim == 0 else torch.cat(t.detach().chunk(self.size, dim))).contiguous()
        out = mine.new_empty(mine.shape[0] // self.size, *mine.shape[1:])
        work = _scatter_into(out, mine, dist.ReduceOp.SUM, self.process_group, async_op=True)
        # The parts lie one after the other along the first dimension; a part has the shape that is wanted.
        return _Started(work, out, mine)

    def broadcast(self, t: Tensor, src: int = 0) -> Tensor:
        check_source(self, src)
        buffer = t.detach().contiguous()
        dist.broadcast(buffer, group=self.process_group, group_src=src)
        if buffer.data_ptr() != t.data_ptr():
            t.detach().copy_(buffer)
        return t

    def broadcast_bytes(self, payload: bytes | None = None) -> bytes:
        message = [own_payload(payload) if self.rank == 0 else None]
        kinds = [str(kind) for kind in self.process_group._device_types]
        device = "cpu" if "cpu" in kinds else f"cuda:{torch.cuda.current_device()}"
        length = torch.tensor([len(message[0] or b"")], dtype=torch.int64, device=device)
        data = torch.empty(int(self.broadcast(length)), dtype=torch.uint8, device=device)
        if self.rank == 0 and message[0]:
            data.copy_(torch.frombuffer(bytearray(message[0]), dtype=torch.uint8))
        if data.numel():
            self.broadcast(data)
        return data.cpu().numpy().tobytes()

    def barrier(self, timeout: float | None = None) -> None:
        dist.barrier(group=self.process_group)

    def abort(self, reason: str) -> None:
        self.process_group.abort()

    def check(self) -> None: ...

    def close(self) -> None:
        dist.destroy_process_group(self.process_group)


class _Started:
    """A collective on its way, and the tensors that it works on."""

    def __init__(self, work: Any, out: Tensor, *held: Tensor) -> None:
        self._work, self._out, self._held = work, out, held

    def __call__(self) -> Tensor:
        if self._work is not None:
            self._work.wait()
        self._work, self._held = None, ()
        return self._out


def _options(op: Any, beside: bool = False) -> Any:
    """`beside`: on a stream of its own, not on the one that waits for it."""
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp(op)
    options.asyncOp = beside
    return options


@dataclass(frozen=True)
class Mesh:
    """Where this rank stands: `tp`, the ranks that share one model; `dp`, the ranks that hold the same shards.

    `device` is where this rank's tensors are. `tp_process_group` and `dp_process_group` are the groups of
    `torch.distributed` beneath, None for a side of one rank.
    """

    tp: Group
    dp: Group
    device: torch.device

    @classmethod
    def build(cls, tp_size: int = 1, device: torch.device | str | None = None) -> Mesh:
        """The grid of all ranks of the default process group, each TP group `tp_size` wide; called by all of them.

        Every call makes groups of its own. Without `torch.distributed` there is one rank. `device`: this rank's
        current GPU where its process group is NCCL's, else the CPU. Raises ValueError where `tp_size` does not divide
        the ranks.
        """
        ready = dist.is_available() and dist.is_initialized()
        world, rank = (dist.get_world_size(), dist.get_rank()) if ready else (1, 0)
        if tp_size < 1 or world % tp_size:
            raise ValueError(
                f"{world} ranks cannot be cut into tensor-parallel groups of {tp_size}: start a multiple of {tp_size} "
                "ranks, or choose a tensor-parallel size that divides them"
            )
        if device is None:
            on_gpu = ready and "nccl" in str(dist.get_backend())
            device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
        rows = [range(start, start + tp_size) for start in range(0, world, tp_size)]
        columns = [range(start, world, tp_size) for start in range(tp_size)]
        return cls(_own_group(rows, rank), _own_group(columns, rank), torch.device(device))

    @property
    def tp_process_group(self) -> Any:
        return getattr(self.tp, "process_group", None)

    @property
    def dp_process_group(self) -> Any:
        return getattr(self.dp, "process_group", None)

    def close(self) -> None:
        """Let the groups go."""
        self.tp.close()
        self.dp.close()


def _timeout() -> timedelta | None:
    """That of the default process group, so that what its maker allowed holds for these as well."""
    world = dist.group.WORLD
    try:
        return None if world is None else world._get_backend(world._device_types[0]).options._timeout
    except (AttributeError, RuntimeError, IndexError):
        return None


def _own_group(groups: Sequence[range], rank: int) -> Group:
    """The group of `groups` that holds `rank`; all ranks make all of them, in the same order."""
    if all(len(ranks) == 1 for ranks in groups):
        return SoloGroup()
    made = [dist.new_group(list(ranks), timeout=_timeout()) for ranks in groups]
    return TorchGroup(next(group for group, ranks in zip(made, groups, strict=True) if rank in ranks))
