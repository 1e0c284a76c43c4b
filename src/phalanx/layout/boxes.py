"""Boxes of a tensor: what two have in common, what is left of one, and those that make up a run of its elements."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

Box = tuple[slice, ...]
"""One slice with explicit bounds a dimension."""


def whole(shape: Sequence[int]) -> Box:
    """All of a tensor."""
    return tuple(slice(0, size) for size in shape)


def sizes(box: Box) -> tuple[int, ...]:
    """The shape of a box."""
    return tuple(side.stop - side.start for side in box)


def meeting(one: Box, other: Box) -> Box | None:
    """What two boxes have in common; None for nothing."""
    met = tuple(slice(max(a.start, b.start), min(a.stop, b.stop)) for a, b in zip(one, other, strict=True))
    return met if all(side.start < side.stop for side in met) else None


def without(box: Box, hole: Box) -> list[Box]:
    """Boxes that make up a box less another one that lies within it."""
    left: list[Box] = []
    rest = box
    for dim, (side, gone) in enumerate(zip(box, hole, strict=True)):
        for part in (slice(side.start, gone.start), slice(gone.stop, side.stop)):
            if part.start < part.stop:
                left.append((*rest[:dim], part, *rest[dim + 1 :]))
        rest = (*rest[:dim], gone, *rest[dim + 1 :])
    return left


def moved(box: Box, here: Box, there: Box) -> Box:
    """A box within `here`, at the same place within `there`."""
    shifts = [b.start - a.start for a, b in zip(here, there, strict=True)]
    return tuple(slice(side.start + by, side.stop + by) for side, by in zip(box, shifts, strict=True))


def relative(box: Box, origin: Box) -> Box:
    """A box within `origin`, counted from its start."""
    return moved(box, origin, whole(sizes(origin)))


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
    full = stop // inner
    yield (slice(row, full), *whole(shape[1:])), start
    yield from flat_boxes(shape, full * inner, stop)
