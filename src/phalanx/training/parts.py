"""Where the elements that a rank owns lie in the whole tensor: as boxes, which any other rank can find its own in.

A rank owns a run of the flattened shard of a parameter (see `Fragment`). A run of a row-major tensor is a few boxes;
each is met with the pieces of the tensor-parallel cut, and every meeting is a box of the whole tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import NamedTuple

from torch import Tensor

from phalanx.layout import pieces
from phalanx.parallel.registry import LayoutRegistry

Box = tuple[slice, ...]
"""One slice with explicit bounds a dimension."""


class Part(NamedTuple):
    """A box of a whole tensor, and a view of this rank's memory that holds its values, in the box's shape."""

    box: Box
    values: Tensor


def parts(registry: LayoutRegistry, name: str, start: int, values: Tensor) -> Iterator[Part]:
    """The boxes of elements `start` ... of the flattened local shard of `name`; `values` holds them, contiguous, in any
    shape. Together they are all of `values`, each element once."""
    flat = values.detach().view(-1)
    for box, first in flat_boxes(registry.local_shape(name), start, start + flat.numel()):
        shape = sizes(box)
        block = flat[first - start : first - start + prod(shape)].view(shape)
        for piece in registry.pieces(name):
            met = meeting(piece.local_slices, box)
            if met is not None:
                yield Part(moved(met, piece.local_slices, piece.global_slices), block[relative(met, box)])


def is_written_here(registry: LayoutRegistry, name: str, box: Box) -> bool:
    """Whether this rank is the first of its tensor-parallel group to hold all of a box."""
    layout = registry[name]
    for rank in range(registry.tp_rank):
        for piece in pieces(layout.partition, layout.shape, rank, registry.tp_size):
            if meeting(piece.global_slices, box) == box:
                return False
    return True


def flat_boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[tuple[Box, int]]:
    """Boxes that make up elements `start` to `stop` of a row-major tensor, in their order, each with the flat position
    of its first element: a part of a row, whole rows, a part of a row, and the same within the parts."""
    if start >= stop:
        return
    if not shape:
        yield (), 0
        return
    inner = prod(shape[1:])
    row, last = start // inner, (stop - 1) // inner
    if start % inner or (row == last and stop % inner):
        end = min(stop, (row + 1) * inner)
        for box, first in flat_boxes(shape[1:], start - row * inner, end - row * inner):
            yield (slice(row, row + 1), *box), row * inner + first
        yield from flat_boxes(shape, end, stop)
        return
    whole = stop // inner
    yield (slice(row, whole), *(slice(0, size) for size in shape[1:])), start
    yield from flat_boxes(shape, whole * inner, stop)


def sizes(box: Box) -> tuple[int, ...]:
    """The shape of a box."""
    return tuple(side.stop - side.start for side in box)


def meeting(one: Box, other: Box) -> Box | None:
    """What two boxes have in common; None for nothing."""
    met = tuple(slice(max(a.start, b.start), min(a.stop, b.stop)) for a, b in zip(one, other, strict=True))
    return met if all(side.start < side.stop for side in met) else None


def moved(box: Box, here: Box, there: Box) -> Box:
    """A box within `here`, at the same place within `there`."""
    shifts = [b.start - a.start for a, b in zip(here, there, strict=True)]
    return tuple(slice(side.start + by, side.stop + by) for side, by in zip(box, shifts, strict=True))


def relative(box: Box, origin: Box) -> Box:
    """A box within `origin`, counted from its start."""
    return moved(box, origin, tuple(slice(0, size) for size in sizes(origin)))
