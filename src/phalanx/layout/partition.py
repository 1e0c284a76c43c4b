"""How one logical tensor is cut over ranks, and the one primitive from which all cutting derives: `pieces`.

A `Partition` names a tensor dimension, views that dimension as a grid, and cuts one axis of the grid. The cut axis is
a run of `Block`s (sub-parameters such as Q, K and V of a fused weight), each dealt over the ranks by itself, so that
every rank gets its share of every block:

    [Q; K; V] stacked         blocks=attention_blocks(...)
    [gate; up] stacked        view=(2, n), axis=1      (or two blocks of n)
    [q_h, k_h, v_h] per head  view=(heads, 3, head_dim), axis=0
    [3, heads, head_dim]      view=(3, heads, head_dim), axis=1
    [q..., k, v] per KV head  blocks=grouped_attention_blocks(...)

Integers and tensors only: nothing here knows of processes or devices.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import prod
from typing import Any, Literal, NamedTuple, Protocol

import torch

from phalanx.layout import heads

Kind = Literal["replicate", "column", "row", "vocab"]
_KINDS = ("replicate", "column", "row", "vocab")


class Sliceable(Protocol):
    """A tensor, or anything that reads a part of itself as one (a tensor that still lies in a file)."""

    @property
    def shape(self) -> Sequence[int]: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def __getitem__(self, index: Any, /) -> torch.Tensor: ...


@dataclass(frozen=True)
class Heads:
    """Makes a block follow the attention heads: it holds whole heads of `head_dim` elements, from head `first` on."""

    role: Literal["query", "kv"]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    first: int = 0

    def __post_init__(self) -> None:
        heads.group_size(self.num_heads, self.num_kv_heads)
        if self.role not in ("query", "kv"):
            raise ValueError(f"unknown role {self.role!r} of heads: use 'query' or 'kv'")
        if self.head_dim < 1 or self.first < 0:
            raise ValueError(f"head_dim {self.head_dim} must be positive and first {self.first} not negative")

    @property
    def count(self) -> int:
        """Heads of this role in the whole model layer."""
        return self.num_heads if self.role == "query" else self.num_kv_heads


@dataclass(frozen=True)
class Block:
    """`size` elements of the cut axis that are dealt by themselves, in whole units of `unit` elements.

    With `heads`, the cut follows the attention heads instead, and `unit` only says where no cut may fall. With
    `copied`, every rank gets the whole block.
    """

    size: int
    unit: int = 1
    heads: Heads | None = None
    copied: bool = False

    def __post_init__(self) -> None:
        if self.size < 0 or self.unit < 1:
            raise ValueError(f"a block needs size >= 0 and unit >= 1, got size {self.size} and unit {self.unit}")
        if self.size % self.unit:
            raise ValueError(
                f"a block of {self.size} elements is not a whole number of units of {self.unit}: "
                "give a unit that divides the size"
            )
        if self.heads is None:
            return
        if self.copied:
            raise ValueError("a block is either copied or cut by heads, not both")
        last = self.heads.first + self.size // self.heads.head_dim
        if self.size % self.heads.head_dim or last > self.heads.count:
            raise ValueError(
                f"a block of {self.size} elements from {self.heads.role} head {self.heads.first} on does not hold "
                f"whole heads of {self.heads.head_dim} elements out of {self.heads.count}: correct size or heads"
            )

    def share(self, rank: int, world: int) -> tuple[range, int]:
        """The elements of this block that `rank` holds, and how many ranks hold each of them."""
        heads.check_rank(rank, world)
        if self.copied:
            return range(self.size), world
        if self.heads is None:
            dealt = heads.deal(self.size // self.unit, rank, world)
            return range(dealt.start * self.unit, dealt.stop * self.unit), 1
        return self._share_of_heads(self.heads, rank, world)

    def _share_of_heads(self, layout: Heads, rank: int, world: int) -> tuple[range, int]:
        if layout.role == "query":
            owned, copies = heads.query_heads(layout.num_heads, layout.num_kv_heads, rank, world), 1
        else:
            owned = heads.kv_heads(layout.num_heads, layout.num_kv_heads, rank, world)
            copies = heads.kv_copies(layout.num_heads, layout.num_kv_heads, rank, world)
        count = self.size // layout.head_dim
        start = min(max(owned.start - layout.first, 0), count)
        stop = max(min(owned.stop - layout.first, count), start)
        share = range(start * layout.head_dim, stop * layout.head_dim)
        if len(share) and (share.start % self.unit or share.stop % self.unit):
            raise ValueError(
                f"rank {rank} of {world} would own elements {share.start}..{share.stop} of a block whose units of "
                f"{self.unit} must stay whole: use fewer ranks"
            )
        return share, copies


class Piece(NamedTuple):
    """One box of a rank's shard: where it lies in the whole tensor, where in the shard, on how many ranks."""

    global_slices: tuple[slice, ...]
    local_slices: tuple[slice, ...]
    copies: int


@dataclass(frozen=True)
class Partition:
    """How one logical tensor is cut. Frozen and hashable; `to_json` and `from_json` are exact inverses.

    kind    "replicate" | "column" (output features) | "row" (input features) | "vocab" (token ids).
    dim     the tensor dimension that is cut, negative from the end; unused by "replicate".
    blocks  runs of the cut axis that are dealt one by one; empty: the whole axis is one block.
    unit    with no blocks: the elements of the cut axis that stay together.
    view    the dimension as a grid of these sizes; empty: the dimension itself.
    axis    the axis of `view` that is cut.

    The constructors name the four kinds; they raise ValueError for what cannot be a partition of any tensor.
    """

    kind: Kind
    dim: int = 0
    blocks: tuple[Block, ...] = ()
    unit: int = 1
    view: tuple[int, ...] = ()
    axis: int = 0

    def __post_init__(self) -> None:
        if self.kind not in _KINDS:
            raise ValueError(f"unknown kind of partition {self.kind!r}: use one of {', '.join(_KINDS)}")
        if self.unit < 1 or (self.blocks and self.unit != 1):
            raise ValueError(f"unit {self.unit} must be at least 1, and be given to the blocks where there are blocks")
        if any(size < 1 for size in self.view) or not 0 <= self.axis < max(len(self.view), 1):
            raise ValueError(f"view {self.view} needs positive sizes, and axis {self.axis} must name one of them")
        if self.view:
            self._check_axis(self.view[self.axis])

    @classmethod
    def replicate(cls) -> Partition:
        """Every rank holds the whole tensor."""
        return cls("replicate")

    @classmethod
    def column(
        cls, blocks: Iterable[Block] = (), *, unit: int = 1, view: Iterable[int] = (), axis: int = 0, dim: int = 0
    ) -> Partition:
        """Cut the output features: dim 0 of a linear weight [out, in] and of its bias [out].

        A transposed weight [in, out] takes dim=-1, which cuts its bias [out] as well.
        """
        return cls("column", dim, tuple(blocks), unit, tuple(view), axis)

    @classmethod
    def row(
        cls, blocks: Iterable[Block] = (), *, unit: int = 1, view: Iterable[int] = (), axis: int = 0, dim: int = -1
    ) -> Partition:
        """Cut the input features: the last dim of a linear weight [out, in]. Its bias is replicated."""
        return cls("row", dim, tuple(blocks), unit, tuple(view), axis)

    @classmethod
    def vocab(cls, *, unit: int = 1) -> Partition:
        """Cut the token ids: dim 0 of an embedding or LM head [vocab, hidden], without padding."""
        return cls("vocab", unit=unit)

    def to_json(self) -> dict[str, Any]:
        """A dict of plain JSON values that `from_json` reads back."""
        return {**asdict(self), "blocks": [asdict(block) for block in self.blocks], "view": list(self.view)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Partition:
        """The partition that `to_json` wrote. Raises ValueError for anything else."""
        try:
            blocks = tuple(
                Block(**{**block, "heads": None if block["heads"] is None else Heads(**block["heads"])})
                for block in data["blocks"]
            )
            return cls(**{**data, "blocks": blocks, "view": tuple(data["view"])})
        except (TypeError, KeyError) as error:
            raise ValueError(f"not a partition written by to_json: {data!r} ({error})") from error

    def axis_blocks(self, size: int) -> tuple[Block, ...]:
        """The blocks of a cut axis of `size` elements."""
        self._check_axis(size)
        return self.blocks or (Block(size, self.unit),)

    def _check_axis(self, size: int) -> None:
        total = sum(block.size for block in self.blocks)
        if self.blocks and total != size:
            raise ValueError(
                f"blocks of {[block.size for block in self.blocks]} elements sum to {total}, but the cut axis has "
                f"{size}: correct the block sizes or the view"
            )
        if size % self.unit:
            raise ValueError(f"the cut axis has {size} elements, not a whole number of units of {self.unit}")


def attention_blocks(
    num_heads: int, num_kv_heads: int, head_dim: int, *, unit: int = 1, v_head_dim: int | None = None
) -> tuple[Block, Block, Block]:
    """The blocks Q, K, V of a stacked projection [Q; K; V]; each is also the one block of its separate projection.

    The Q block is that of the output projection's input features too. `unit`: elements that no cut may split.
    """
    v_dim = head_dim if v_head_dim is None else v_head_dim
    return (
        Block(num_heads * head_dim, unit, Heads("query", num_heads, num_kv_heads, head_dim)),
        Block(num_kv_heads * head_dim, unit, Heads("kv", num_heads, num_kv_heads, head_dim)),
        Block(num_kv_heads * v_dim, unit, Heads("kv", num_heads, num_kv_heads, v_dim)),
    )


def grouped_attention_blocks(num_heads: int, num_kv_heads: int, head_dim: int, *, unit: int = 1) -> tuple[Block, ...]:
    """The blocks of a projection stored per KV head as [its query heads; k; v], the order of a rank's shard too."""
    group = heads.group_size(num_heads, num_kv_heads)

    def block(role: Literal["query", "kv"], first: int, count: int) -> Block:
        return Block(count * head_dim, unit, Heads(role, num_heads, num_kv_heads, head_dim, first))

    return tuple(
        each
        for head in range(num_kv_heads)
        for each in (block("query", head * group, group), block("kv", head, 1), block("kv", head, 1))
    )


def pieces(partition: Partition, shape: Sequence[int], rank: int, world: int) -> list[Piece]:
    """The boxes that make up the shard of `rank`, in the order in which they lie in it.

    Slices have explicit bounds and one entry a tensor dimension. A rank that holds nothing has no pieces. Raises
    ValueError where rank, shape and partition do not fit each other.
    """
    heads.check_rank(rank, world)
    whole = tuple(slice(0, size) for size in shape)
    if partition.kind == "replicate":
        return [Piece(whole, whole, world)] if prod(shape) else []
    dim = _cut_dim(partition, shape)
    runs = _runs(partition, shape[dim], rank, world)
    before, after = whole[:dim], whole[dim + 1 :]
    return [
        Piece(
            (*before, slice(start, start + length), *after),
            (*before, slice(local, local + length), *after),
            copies,
        )
        for start, local, length, copies in runs
        if prod(shape)
    ]


def local_shape(partition: Partition, shape: Sequence[int], rank: int, world: int) -> tuple[int, ...]:
    """The shape of the shard of `rank`; the cut dimension may be 0."""
    heads.check_rank(rank, world)
    if partition.kind == "replicate":
        return tuple(shape)
    dim = _cut_dim(partition, shape)
    length = sum(run[2] for run in _runs(partition, shape[dim], rank, world))
    return (*shape[:dim], length, *shape[dim + 1 :])


def shard(x: Sliceable, partition: Partition, rank: int, world: int) -> torch.Tensor:
    """The part of `x` that `rank` holds, contiguous and without gradient; of a lazy `x` only the pieces are read.

    It owns its memory, unless it is all of a tensor `x`: then it may share the memory of `x`.
    """
    parts = pieces(partition, x.shape, rank, world)
    with torch.no_grad():
        if len(parts) == 1:
            part = x[parts[0].global_slices].contiguous()
            shared_with_more = part.untyped_storage().nbytes() > part.numel() * part.element_size()
            return part.clone() if shared_with_more else part.detach()
        device = x.device if isinstance(x, torch.Tensor) else None
        out = torch.empty(local_shape(partition, x.shape, rank, world), dtype=x.dtype, device=device)
        for piece in parts:
            out[piece.local_slices] = x[piece.global_slices]
    return out


def shard_into(out: torch.Tensor, x: Sliceable, partition: Partition, rank: int, world: int) -> None:
    """`shard` into memory that is there already: `out` may have another dtype or device. Of a lazy `x` one piece at a
    time is read.

    Raises ValueError where `out` has not the shape of the shard, or a lazy `x` gives a part of another shape.
    """
    expected = local_shape(partition, x.shape, rank, world)
    if tuple(out.shape) != expected:
        raise ValueError(f"the shard of rank {rank} of {world} is {expected}, but there is room for {tuple(out.shape)}")
    with torch.no_grad():
        for piece in pieces(partition, x.shape, rank, world):
            copy_part(out[piece.local_slices], x, piece.global_slices)


def copy_part(out: torch.Tensor, x: Sliceable, index: tuple[slice, ...]) -> None:
    """`out` becomes `x[index]`. A lazy `x` with a method `read_into(out, index)` writes there by itself.

    Raises ValueError for a part of another shape than `out` has.
    """
    read_into = getattr(x, "read_into", None)
    if read_into is not None:
        read_into(out, index)
        return
    part = x[index]
    if part.shape != out.shape:
        raise ValueError(f"asked for a part of {tuple(out.shape)}, the source gave {tuple(part.shape)}")
    out.copy_(part)


def merge(shards: Sequence[Sliceable], partition: Partition, shape: Sequence[int]) -> torch.Tensor:
    """The whole tensor of `shape` from the shards of all ranks in order: the inverse of `shard`.

    Raises ValueError for a shard whose shape or dtype is not the one that its rank must hold.
    """
    if not shards:
        raise ValueError("merge needs the shards of all ranks, got none")
    world = len(shards)
    for rank, part in enumerate(shards):
        expected = local_shape(partition, shape, rank, world)
        if tuple(part.shape) != expected or part.dtype != shards[0].dtype:
            raise ValueError(
                f"shard {rank} of {world} is {part.dtype} {tuple(part.shape)}, but a {partition.kind} cut of "
                f"{tuple(shape)} needs {shards[0].dtype} {expected}: pass the shards in the order of their ranks"
            )
    device = shards[0].device if isinstance(shards[0], torch.Tensor) else None
    out = torch.empty(tuple(shape), dtype=shards[0].dtype, device=device)
    with torch.no_grad():
        for rank, part in enumerate(shards):
            for piece in pieces(partition, shape, rank, world):
                out[piece.global_slices] = part[piece.local_slices]
    return out


def _cut_dim(partition: Partition, shape: Sequence[int]) -> int:
    dims = len(shape)
    if partition.kind == "row" and dims == 1:
        raise ValueError(
            f"a row partition cannot cut the 1-D shape {tuple(shape)}: the bias of a row layer is replicated "
            "(Partition.replicate()), a norm over cut features is Partition.column()"
        )
    if not -dims <= partition.dim < dims:
        raise ValueError(f"a {partition.kind} partition cuts dim {partition.dim}, which shape {tuple(shape)} lacks")
    return partition.dim % dims


def _runs(partition: Partition, size: int, rank: int, world: int) -> list[tuple[int, int, int, int]]:
    """(global start, local start, length, copies) of the runs of one cut dimension that `rank` holds."""
    view = partition.view or (size,)
    if prod(view) != size:
        raise ValueError(f"view {view} has {prod(view)} elements, but the cut dimension has {size}: correct the view")
    inner = prod(view[partition.axis + 1 :])
    owned: list[tuple[int, int, int]] = []
    offset = 0
    for block in partition.axis_blocks(view[partition.axis]):
        share, copies = block.share(rank, world)
        if len(share):
            owned.append(((offset + share.start) * inner, len(share) * inner, copies))
        offset += block.size
    runs: list[tuple[int, int, int, int]] = []
    local = 0
    for outer in range(prod(view[: partition.axis])):
        for start, length, copies in owned:
            start += outer * view[partition.axis] * inner
            if runs and (runs[-1][0] + runs[-1][2], runs[-1][3]) == (start, copies):
                runs[-1] = (*runs[-1][:2], runs[-1][2] + length, copies)
            else:
                runs.append((start, local, length, copies))
            local += length
    return runs
