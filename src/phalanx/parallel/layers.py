"""Linear layers and embeddings whose weight is cut: subclasses that a module becomes in place.

The class of a module changes to one that inherits from both a mixin of this file and its former class, so that
`isinstance` holds and its other methods stay. Its parameters stay the same objects and hold this rank's shard. What a
layer knows of its cut is one record, `module.cut`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.distributed.group import Group
from phalanx.layout import Partition, local_shape, pieces
from phalanx.parallel import regions
from phalanx.parallel.overlap import linear
from phalanx.parallel.regions import Run

# Where the copied parts lie, and how many elements all of them have along the cut dimension.
Copies = tuple[tuple[Run, ...], int]


class Entry:
    """The way into a region for linears that read the same tensor: it is entered once, and left to all of them.

    Two layers share the entered tensor only if they are given the very same tensor, so that whatever else a block does
    with its input (a residual, a router) is not touched, and one reduction of gradients serves all of them.
    """

    def __init__(self, enter: Callable[[Tensor], Tensor]) -> None:
        self.enter = enter
        self.readers = 0
        self._left = 0
        self._source: Tensor | None = None
        self._entered: Tensor | None = None
        self._recorded = False

    def __call__(self, x: Tensor) -> Tensor:
        entered = self._entered
        if entered is None or x is not self._source or self._recorded != torch.is_grad_enabled():
            entered = self.enter(x)
            self._source, self._entered, self._recorded = x, entered, torch.is_grad_enabled()
            self._left = self.readers
        self._left -= 1
        if self._left <= 0:
            self._source = self._entered = None
        return entered


@dataclass
class Cut:
    """How one layer is cut, and how its input and output cross the region's border.

    out_sizes   the ranks' extents of the output's last dimension (of a row layer: of its input's).
    entry       column: the way in; None where the input is in the region already.
    leave       row and embedding: from this rank's part of a sum to the layer's output.
    gather      column: join the ranks' outputs.
    split       row: the input is whole, take this rank's part.
    copies      parts of the weight that lie on several ranks, as `sum_copies` takes them.
    """

    group: Group
    partition: Partition
    transposed: bool = False
    sizes: tuple[int, ...] = ()
    entry: Entry | None = None
    leave: Callable[[Tensor], Tensor] | None = None
    gather: bool = False
    split: bool = False
    weight_copies: Copies | None = None
    bias_copies: Copies | None = None
    vocab: range = field(default=range(0))


class CutLayer(nn.Module):
    """What all layers of this file have in common."""

    cut: Cut
    weight: Tensor
    bias: Tensor | None

    def _shared(self, parameter: Tensor, dim: int, copies: Copies | None) -> Tensor:
        if copies is None or not torch.is_grad_enabled():
            return parameter
        return regions.sum_copies(parameter, self.cut.group, dim, *copies)

    def _product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return linear(x, weight.t() if self.cut.transposed else weight, bias)


class ColumnLinear(CutLayer):
    """Every rank computes its slice of the output features from the whole input."""

    def forward(self, x: Tensor) -> Tensor:
        cut = self.cut
        if cut.entry is not None:
            x = cut.entry(x)
        weight = self._shared(self.weight, 1 if cut.transposed else 0, cut.weight_copies)
        bias = None if self.bias is None else self._shared(self.bias, 0, cut.bias_copies)
        y = self._product(x, weight, bias)
        return regions.gather_out(y, cut.group, y.dim() - 1, cut.sizes) if cut.gather else y


class RowLinear(CutLayer):
    """Every rank computes a part of the sum over the input features from its slice of them; the bias is added once."""

    def forward(self, x: Tensor) -> Tensor:
        cut = self.cut
        if cut.split:
            x = regions.split_in(x, cut.group, x.dim() - 1, cut.sizes)
        y = self._product(x, self.weight, None)
        if cut.leave is not None:
            y = cut.leave(y)
        return y if self.bias is None else y + self.bias


class VocabEmbedding(CutLayer):
    """Every rank holds the rows of a range of token ids; the ranks' rows are summed, all but one being zero."""

    def forward(self, ids: Tensor) -> Tensor:
        first, last = self.cut.vocab.start, self.cut.vocab.stop
        elsewhere = (ids < first) | (ids >= last)
        index = (ids - first).masked_fill(elsewhere, 0)
        # An id that no rank has is looked up where no rank has anything, so that all of them fail as PyTorch does.
        index = index.masked_fill((ids < 0) | (ids >= sum(self.cut.sizes)), last - first)
        rows: Tensor = super().forward(index)
        rows = rows.masked_fill(elsewhere[..., None], 0)
        return rows if self.cut.leave is None else self.cut.leave(rows)


def become(module: nn.Module, mixin: type[CutLayer], cut: Cut) -> None:
    """Make `module` an instance of `mixin` and of its own class."""
    module.__class__ = joined(mixin, type(module))
    module.cut = cut  # type: ignore[assignment]


def joined(mixin: type[nn.Module], own: type[nn.Module]) -> type[nn.Module]:
    """The class that inherits from both: one for all layers, so that what is compiled for one serves the others."""
    known = _JOINED.get((mixin, own))
    if known is None:
        known = type(f"{mixin.__name__}[{own.__name__}]", (mixin, own), {"__module__": own.__module__})
        _JOINED[mixin, own] = known
    return known


_JOINED: dict[tuple[type, type], type[nn.Module]] = {}


def copied_runs(partition: Partition, shape: Sequence[int], rank: int, world: int) -> Copies | None:
    """The parts of a weight of `shape` that lie on several ranks, as `sum_copies` takes them; None if none do."""
    if partition.kind == "replicate":
        return None
    dim = partition.dim % len(shape)
    held = [[p for p in pieces(partition, shape, r, world) if p.copies > 1] for r in range(world)]
    # Copies are of whole heads: what two ranks hold of them is the same, or nothing in common.
    slices = [piece.global_slices[dim] for of_rank in held for piece in of_rank]
    ranges = sorted({(each.start, each.stop) for each in slices})
    if not ranges:
        return None
    offsets = dict(zip(ranges, accumulate((stop - start for start, stop in ranges), initial=0), strict=False))
    runs = []
    for piece in held[rank]:
        whole, local = piece.global_slices[dim], piece.local_slices[dim]
        runs.append(Run(offsets[whole.start, whole.stop], local.start, local.stop - local.start))
    return tuple(runs), sum(stop - start for start, stop in ranges)


def cut_sizes(partition: Partition, shape: Sequence[int], world: int) -> tuple[int, ...]:
    """Every rank's extent of the cut dimension."""
    dim = partition.dim % len(shape)
    return tuple(local_shape(partition, shape, rank, world)[dim] for rank in range(world))


def is_linear(module: nn.Module) -> bool:
    """Whether the module computes `x @ weight.T + bias` and nothing else."""
    return isinstance(module, nn.Linear) and (
        type(module).forward is nn.Linear.forward or type(module).__name__ in _LINEAR_BY_NAME
    )


def is_conv1d(module: nn.Module) -> bool:
    """Whether the module is transformers' Conv1D: a linear whose weight lies transposed, [in, out]."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


# Their own forwards say the same in other words.
_LINEAR_BY_NAME = ("FalconLinear", "NonDynamicallyQuantizableLinear")


def linear_sizes(module: Any, shape: Sequence[int], transposed: bool) -> None:
    """Say in the module's attributes how large its weight is now."""
    outs, ins = (shape[1], shape[0]) if transposed else (shape[0], shape[1])
    if transposed:
        module.nf, module.nx = outs, ins
    else:
        module.out_features, module.in_features = outs, ins
