"""Where the elements that a rank owns lie in the whole tensor: as boxes, which any other rank can find its own in.

A rank owns a run of the flattened shard of a parameter (see `Fragment`). A run of a row-major tensor is a few boxes;
each is met with the pieces of the tensor-parallel cut, and every meeting is a box of the whole tensor.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import NamedTuple

from torch import Tensor

from phalanx.layout import pieces
from phalanx.layout.boxes import Box, flat_boxes, meeting, moved, relative, sizes
from phalanx.parallel.registry import LayoutRegistry


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
