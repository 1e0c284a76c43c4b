"""What a group of ranks offers, and the group of one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Literal, Self

from torch import Tensor

Reduction = Literal["sum", "max"]
Pending = Callable[[], Tensor]
"""A collective that has started: waits for it and returns its result."""


class GroupError(RuntimeError):
    """A collective did not finish, and the group is of no more use. Names the rank at fault and the reason."""


class Group(ABC):
    """Ranks 0 .. ``size - 1`` that call the same collectives in the same order, each from one thread.

    A collective returns its result; a tensor that was passed in may have been overwritten. None of them is recorded by
    autograd. When one fails it raises `GroupError` on every rank that is still there, and so does every later call.
    """

    rank: int
    size: int
    capturable: bool = True
    """Whether a CUDA graph can hold its collectives."""
    fault_flag: Tensor | None = None
    """On this rank's device: not 0 once a collective that no host watches has failed; None where there is none."""

    @abstractmethod
    def all_reduce(self, t: Tensor, op: Reduction = "sum") -> Tensor:
        """The sum, or the largest, of every rank's `t`, element by element (same shape and dtype everywhere)."""

    @abstractmethod
    def all_gather(self, t: Tensor, dim: int = 0, sizes: Sequence[int] | None = None) -> Tensor:
        """Every rank's `t`, one after the other along `dim`, by rank.

        `sizes[r]` is rank r's extent along `dim` (may be zero, may differ; the other dimensions and the dtype are the
        same everywhere). Left out: every rank's extent is this rank's. Raises ValueError if `t` does not fit `sizes`.
        """

    def all_reduce_add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor] | None:
        """``new`` = all_reduce(x) + residual and (the RMSNorm of new, new), [rows, N] each, where that is faster than
        one after the other; else None. Which of the two depends on shapes, strides and dtypes only."""
        return None

    def reduce_scatter(self, t: Tensor, dim: int = 0, sizes: Sequence[int] | None = None) -> Tensor:
        """This rank's part of the sum of every rank's `t` (same shape and dtype everywhere), cut along `dim`.

        `sizes[r]` is the extent of rank r's part; left out: equal parts. Raises ValueError if they do not fit `t`.
        """
        start, length = scatter_range(self, t, dim, sizes)
        return self.all_reduce(t).narrow(dim, start, length).contiguous()

    def start_all_reduce(self, t: Tensor) -> Pending:
        """`all_reduce`, while the caller goes on; until it is over, `t` is nobody's to read or write."""
        out = self.all_reduce(t)
        return lambda: out

    def start_reduce_scatter(self, t: Tensor, dim: int, sizes: Sequence[int]) -> Pending:
        """`reduce_scatter`, while the caller goes on; until it is over, `t` is nobody's to read or write."""
        out = self.reduce_scatter(t, dim, sizes)
        return lambda: out

    @abstractmethod
    def broadcast(self, t: Tensor, src: int = 0) -> Tensor:
        """Fill `t` with rank `src`'s `t` (same shape and dtype everywhere) and return it."""

    @abstractmethod
    def broadcast_bytes(self, payload: bytes | None = None) -> bytes:
        """Rank 0's `payload`, on every rank. Rank 0 must give one; what others give is not looked at.

        The other ranks may wait here without limit for rank 0, which may be idle.
        """

    @abstractmethod
    def barrier(self, timeout: float | None = None) -> None:
        """Return once every rank has come here. `timeout` in seconds replaces the group's own."""

    @abstractmethod
    def abort(self, reason: str) -> None:
        """Give the group up, from any thread. Later collectives raise, those in flight too if they can be stopped."""

    @abstractmethod
    def check(self) -> None:
        """Raise GroupError if the group has failed, was aborted or was closed."""

    @abstractmethod
    def close(self) -> None:
        """Let go of the group's connections; what is still queued on a GPU is given up. Closing twice is fine."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def gather_sizes(group: Group, t: Tensor, dim: int, sizes: Sequence[int] | None) -> tuple[int, list[int]]:
    """`dim` counted from the front and every rank's extent along it, checked against this rank's `t`."""
    if not -t.ndim <= dim < t.ndim:
        raise ValueError(f"all_gather along dim {dim} of a tensor of shape {tuple(t.shape)}: it has no such dimension")
    dim %= t.ndim
    sizes = [t.shape[dim]] * group.size if sizes is None else list(sizes)
    if len(sizes) != group.size or t.shape[dim] != sizes[group.rank]:
        raise ValueError(
            f"all_gather on rank {group.rank} of {group.size}: a tensor of shape {tuple(t.shape)} does not fit "
            f"sizes {sizes} along dim {dim}; expected one size a rank, and this rank's extent to be its own"
        )
    return dim, sizes


def scatter_range(group: Group, t: Tensor, dim: int, sizes: Sequence[int] | None) -> tuple[int, int]:
    """Where this rank's part of `t` begins along `dim`, and its extent."""
    extent = t.shape[dim]
    if sizes is None:
        sizes = [extent // group.size] * group.size
    if len(sizes) != group.size or sum(sizes) != extent:
        raise ValueError(
            f"reduce_scatter of shape {tuple(t.shape)} along dim {dim} over {group.size} ranks: parts of "
            f"{list(sizes)} do not add up to {extent}; give one size a rank"
        )
    return sum(sizes[: group.rank]), sizes[group.rank]


class SoloGroup(Group):
    """The group of one rank: nothing to exchange, nothing that can fail."""

    rank = 0
    size = 1

    def all_reduce(self, t: Tensor, op: Reduction = "sum") -> Tensor:
        return t

    def all_gather(self, t: Tensor, dim: int = 0, sizes: Sequence[int] | None = None) -> Tensor:
        gather_sizes(self, t, dim, sizes)
        return t

    def broadcast(self, t: Tensor, src: int = 0) -> Tensor:
        check_source(self, src)
        return t

    def broadcast_bytes(self, payload: bytes | None = None) -> bytes:
        return own_payload(payload)

    def barrier(self, timeout: float | None = None) -> None: ...

    def abort(self, reason: str) -> None: ...

    def check(self) -> None: ...

    def close(self) -> None: ...


def check_source(group: Group, src: int) -> None:
    if not 0 <= src < group.size:
        raise ValueError(f"broadcast from rank {src}: the group has ranks 0 to {group.size - 1}")


def own_payload(payload: bytes | None) -> bytes:
    """Rank 0's payload, which must be there."""
    if payload is None:
        raise ValueError("broadcast_bytes: rank 0 must give the bytes to send, got None")
    return payload
