"""The sum of a region's input gradients travels while the gradients of its weights are computed.

A linear's backward makes two products: the gradient of its input, which the other ranks wait for, and that of its
weight, which nobody waits for. Autograd makes both at once. Here they are two nodes, and the way into the region two
more, so that autograd, which always runs the node that was made last, comes to them in this order:

    input gradients of all linears that read the entered tensor
    begin     starts the sum over the ranks
    weight gradients of those linears
    finish    waits for the sum

This is how Megatron-LM hides its all-reduce (Shoeybi et al. 2019, arXiv:1909.08053), for any number of readers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from phalanx.distributed.group import Pending

Start = Callable[[Tensor], Pending]


def enter(x: Tensor, forward: Callable[[Tensor], Tensor], start: Start) -> Tensor:
    """`x` into a region, by `forward`, whose transpose is `start` and what it returns. Not for what is compiled.

    Linears that are to leave their weights' gradients for later call `linear` with exactly this tensor.
    """
    if not (torch.is_grad_enabled() and x.requires_grad):
        return forward(x)
    crossing = _Crossing(start)
    out: Tensor = _Begin.apply(_Gap.apply(_Finish.apply(x, crossing, forward)), crossing)
    return out


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`F.linear`; where `x` comes from `enter`, the gradients of weight and bias wait for the sum's start."""
    if torch.compiler.is_compiling() or not weight.requires_grad or torch.is_autocast_enabled(x.device.type):
        return F.linear(x, weight, bias)
    begin = x.grad_fn
    if not isinstance(begin, _BEGIN):
        return F.linear(x, weight, bias)
    shape = (*x.shape[:-1], weight.shape[0])
    later: Tensor = _WeightGradient.apply(x.detach(), weight, bias, shape)
    # The only way to move a node in autograd's order; PyTorch has had it since 2.2.
    later.grad_fn._set_sequence_nr(begin._sequence_nr() - 1)  # type: ignore[union-attr]
    out: Tensor = _InputGradient.apply(x, weight, bias, later)
    return out


class _Crossing:
    """Between the start and the end of one sum."""

    def __init__(self, start: Start) -> None:
        self.start = start
        self.pending: Pending | None = None


class _Finish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, crossing: _Crossing, forward: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.crossing = crossing
        with torch.no_grad():
            out = forward(x)
        return out.view_as(out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> Any:
        pending, ctx.crossing.pending = ctx.crossing.pending, None
        return pending(), None, None


class _Gap(torch.autograd.Function):
    """Leaves a number free between the two halves, in the order in which autograd runs nodes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g


class _Begin(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, crossing: _Crossing) -> Tensor:
        ctx.crossing = crossing
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> Any:
        ctx.crossing.pending = ctx.crossing.start(g)
        # Only its shape is looked at until the sum is there.
        return g, None


class _WeightGradient(torch.autograd.Function):
    """Nothing forward, in the shape of the linear's output; backward, the gradients of weight and bias."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, shape: tuple[int, ...]) -> Tensor:
        ctx.save_for_backward(x)
        ctx.biased = bias is not None and bias.requires_grad
        return x.new_empty(()).expand(shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        rows = g.reshape(-1, g.shape[-1])
        weight = rows.t() @ x.reshape(-1, x.shape[-1])
        return None, weight, rows.sum(0) if ctx.biased else None, None


class _InputGradient(torch.autograd.Function):
    """The linear; backward, the gradient of its input. `later` gets that of its output."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, later: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return F.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> Any:
        (weight,) = ctx.saved_tensors
        return g @ weight, None, None, g


_BEGIN: Any = _Begin._backward_cls
