"""The ways into and out of a region in which the ranks of a group hold different parts: forward and backward together.

Outside of such a region all ranks hold the same activations and the same whole gradients. Each function is the
transpose of another one, which its backward is, so that they can be differentiated more than once:

    forward                         backward
    copy_in      x                  sum of the ranks' gradients
    sum_out      sum of the parts   g
    gather_out   parts, joined      this rank's part of g
    split_in     this rank's part   parts of g, joined
    gather_in    parts, joined      this rank's part of the sum        (a sequence that is cut over the ranks: in)
    scatter_out  part of the sum    parts of g, joined                 (and out)

`sizes` are the ranks' extents along `dim`. The named regions follow Megatron-LM (Shoeybi et al. 2019, arXiv:1909.08053)
and its sequence parallelism (Korthikanti et al. 2022, arXiv:2205.05198).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from phalanx.distributed.group import Group


class Run(NamedTuple):
    """A part of a weight that lies on several ranks: where in the buffer of all such parts, where in the shard."""

    buffer: int
    local: int
    length: int


def copy_in(x: Tensor, group: Group) -> Tensor:
    """`x`, the same on all ranks, into a region where each computes a part from it."""
    out: Tensor = _CopyIn.apply(x, group)
    return out


def sum_out(x: Tensor, group: Group) -> Tensor:
    """The sum of every rank's part, the same on all ranks."""
    out: Tensor = _SumOut.apply(x, group)
    return out


def gather_out(x: Tensor, group: Group, dim: int, sizes: Sequence[int]) -> Tensor:
    """The parts joined along `dim`, the same on all ranks, for what all ranks compute alike."""
    out: Tensor = _GatherOut.apply(x, group, dim, tuple(sizes))
    return out


def split_in(x: Tensor, group: Group, dim: int, sizes: Sequence[int]) -> Tensor:
    """This rank's part along `dim` of an `x` that is the same on all ranks."""
    out: Tensor = _SplitIn.apply(x, group, dim, tuple(sizes))
    return out


def gather_in(x: Tensor, group: Group, dim: int, sizes: Sequence[int]) -> Tensor:
    """The parts joined along `dim`, for a region where each rank computes a part from the whole."""
    out: Tensor = _GatherIn.apply(x, group, dim, tuple(sizes))
    return out


def scatter_out(x: Tensor, group: Group, dim: int, sizes: Sequence[int]) -> Tensor:
    """This rank's part along `dim` of the sum of every rank's `x`."""
    out: Tensor = _ScatterOut.apply(x, group, dim, tuple(sizes))
    return out


def sum_copies(weight: Tensor, group: Group, dim: int, runs: Sequence[Run], length: int) -> Tensor:
    """`weight`, parts of which lie on several ranks; the gradient of those parts is summed over the ranks.

    `runs`: where each such part lies along `dim` of a buffer of `length` that all ranks lay theirs in, and along `dim`
    of `weight`.
    """
    out: Tensor = _SumCopies.apply(weight, group, dim, tuple(runs), length)
    return out


class _CopyIn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return (sum_out(g, ctx.group) if torch.is_grad_enabled() else ctx.group.all_reduce(g)), None


class _SumOut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return group.all_reduce(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return (copy_in(g, ctx.group) if torch.is_grad_enabled() else g), None


class _GatherOut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, dim: int, sizes: tuple[int, ...]) -> Tensor:
        ctx.group, ctx.dim, ctx.sizes = group, dim, sizes
        return group.all_gather(x, dim, sizes)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return split_in(g, ctx.group, ctx.dim, ctx.sizes), None, None, None


class _SplitIn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, dim: int, sizes: tuple[int, ...]) -> Tensor:
        ctx.group, ctx.dim, ctx.sizes = group, dim, sizes
        return _part(x, group, dim, sizes)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return gather_out(g, ctx.group, ctx.dim, ctx.sizes), None, None, None


class _GatherIn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, dim: int, sizes: tuple[int, ...]) -> Tensor:
        ctx.group, ctx.dim, ctx.sizes = group, dim, sizes
        return group.all_gather(x, dim, sizes)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return scatter_out(g, ctx.group, ctx.dim, ctx.sizes), None, None, None


class _ScatterOut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, dim: int, sizes: tuple[int, ...]) -> Tensor:
        ctx.group, ctx.dim, ctx.sizes = group, dim, sizes
        return group.reduce_scatter(x, dim, sizes)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return gather_in(g, ctx.group, ctx.dim, ctx.sizes), None, None, None


class _SumCopies(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, group: Group, dim: int, runs: tuple[Run, ...], length: int) -> Tensor:
        ctx.group, ctx.dim, ctx.runs, ctx.length = group, dim, runs, length
        return weight.view_as(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> Any:
        # What a rank does not hold is zero in the sum.
        total = g.new_zeros([*g.shape[: ctx.dim], ctx.length, *g.shape[ctx.dim + 1 :]])
        for run in ctx.runs:
            total.narrow(ctx.dim, run.buffer, run.length).copy_(g.narrow(ctx.dim, run.local, run.length))
        total = ctx.group.all_reduce(total)
        out = g.clone(memory_format=torch.contiguous_format)
        for run in ctx.runs:
            out.narrow(ctx.dim, run.local, run.length).copy_(total.narrow(ctx.dim, run.buffer, run.length))
        return out, None, None, None, None


def _part(x: Tensor, group: Group, dim: int, sizes: Sequence[int]) -> Tensor:
    return x.narrow(dim, sum(sizes[: group.rank]), sizes[group.rank]).contiguous()
