"""Ranks that are threads of one process: for checks that compare many ranks with one, and for tests.

Tensors change hands by reference. Sums are formed in rank order (in fp32 for fp16 and bf16), so they are the same on
every rank and in every run. On a GPU all ranks must use the same stream.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from phalanx.distributed.group import Group, GroupError, Reduction, check_source, gather_sizes, own_payload

T = TypeVar("T")


class _Table:
    """Where the ranks lay what they bring. Nobody writes to what lies there, so one meeting a collective is enough."""

    def __init__(self, size: int, timeout: float) -> None:
        self.size = size
        self.timeout = timeout
        self.fault: str | None = None
        self._changed = threading.Condition()
        self._turn = 0
        self._laid: dict[int, tuple[str, Any]] = {}
        self._full: list[Any] = []
        self._left: list[int] = []

    def exchange(self, rank: int, what: str, mine: object, timeout: float) -> list[Any]:
        """Lay down `mine` and return what every rank laid down, by rank."""
        with self._changed:
            self.check()
            turn = self._turn
            self._laid[rank] = (what, mine)
            if len(self._laid) == self.size:
                self._complete()
            elif not self._changed.wait_for(lambda: self._turn != turn or self.fault or self._left, timeout):
                absent = [r for r in range(self.size) if r not in self._laid]
                self.break_up(f"{what}: no answer from ranks {absent} within {timeout:g} s")
            if self._turn == turn:
                self.break_up(f"{what}: ranks {self._left} have already returned")
                self.check()
            # The next turn needs this rank too: until it has laid down again, _full is this turn's.
            return self._full

    def _complete(self) -> None:
        calls = [self._laid[r] for r in range(self.size)]
        if len({what for what, _ in calls}) > 1:
            made = ", ".join(f"rank {r}: {what}" for r, (what, _) in enumerate(calls))
            self.break_up(f"the ranks called different collectives ({made})")
            return
        self._full = [value for _, value in calls]
        self._laid = {}
        self._turn += 1
        self._changed.notify_all()

    def leave(self, rank: int) -> None:
        with self._changed:
            self._left.append(rank)
            self._changed.notify_all()

    def break_up(self, reason: str) -> None:
        """End the group for every rank; the first reason given is the one that all of them report."""
        with self._changed:
            self.fault = self.fault or reason
            self._changed.notify_all()

    def check(self) -> None:
        if self.fault is not None:
            raise GroupError(self.fault)


class ThreadGroup(Group):
    """One rank of `run_threads`."""

    capturable = False

    def __init__(self, table: _Table, rank: int) -> None:
        self._table = table
        self.rank = rank
        self.size = table.size

    def _exchange(self, what: str, mine: object, timeout: float | None = None) -> list[Any]:
        return self._table.exchange(self.rank, what, mine, self._table.timeout if timeout is None else timeout)

    def all_reduce(self, t: Tensor, op: Reduction = "sum") -> Tensor:
        parts = self._exchange(f"all_reduce{_largest(op)}{_kind(t)}", t.detach().clone())
        if op == "max":
            return torch.stack(parts).amax(0)
        wide = torch.float32 if t.dtype in (torch.float16, torch.bfloat16) else t.dtype
        total = parts[0].to(wide, copy=True)
        for part in parts[1:]:
            total += part
        return total.to(t.dtype)

    def all_gather(self, t: Tensor, dim: int = 0, sizes: Sequence[int] | None = None) -> Tensor:
        dim, sizes = gather_sizes(self, t, dim, sizes)
        return torch.cat(self._exchange(f"all_gather of {sizes} along dim {dim}", t.detach().clone()), dim)

    def broadcast(self, t: Tensor, src: int = 0) -> Tensor:
        check_source(self, src)
        mine = t.detach().clone() if self.rank == src else None
        parts = self._exchange(f"broadcast{_kind(t)} from rank {src}", mine)
        if self.rank != src:
            t.detach().copy_(parts[src])
        return t

    def broadcast_bytes(self, payload: bytes | None = None) -> bytes:
        mine = own_payload(payload) if self.rank == 0 else None
        # Rank 0 waits for ranks that are at work, the others for a rank that may be idle.
        sent: bytes = self._exchange("broadcast_bytes", mine, None if self.rank == 0 else threading.TIMEOUT_MAX)[0]
        return sent

    def barrier(self, timeout: float | None = None) -> None:
        self._exchange("barrier", None, timeout)

    def abort(self, reason: str) -> None:
        self._table.break_up(reason)

    def check(self) -> None:
        self._table.check()

    def close(self) -> None: ...


def _largest(op: Reduction) -> str:
    return "" if op == "sum" else " (max)"


def _kind(t: Tensor) -> str:
    return f" of {t.dtype} {list(t.shape)}"


def run_threads(world: int, fn: Callable[[Group], T], timeout: float = 60.0) -> list[T]:
    """Call `fn(group)` on `world` ranks, each a thread, and return what each returned, by rank.

    An exception on one rank ends the others at their next collective; the first one is raised here, with a note that
    names its rank. `timeout`: seconds that a rank waits for the others inside a collective.
    """
    if world < 1:
        raise ValueError(f"run_threads: world must be at least 1, got {world}")
    table = _Table(world, timeout)
    results: list[Any] = [None] * world
    errors: list[BaseException] = []

    def work(rank: int) -> None:
        try:
            results[rank] = fn(ThreadGroup(table, rank))
        except BaseException as error:
            error.add_note(f"on rank {rank} of {world}")
            errors.append(error)
            table.break_up(f"rank {rank} failed: {type(error).__name__}: {error}")
        table.leave(rank)

    threads = [threading.Thread(target=work, args=(rank,), name=f"rank {rank}", daemon=True) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results
