"""Kernels of a training step: RMSNorm and gated SiLU with their backwards, and what a cross entropy needs of logits.

Forward and backward each read their inputs once and write their outputs once; sums are fp32. Rows are programs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from phalanx.ops.triton.support import multiprocessors

_PART = 4096


@triton.jit
def _norm_forward(x, weight, y, rstd, width, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < width
    value = tl.load(x + row * width + column, mask=mask, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt_rn(tl.sum(value * value, 0) / width + eps)
    tl.store(rstd + row, scale)
    normed = (value * scale).to(y.dtype.element_ty).to(tl.float32)
    factor = tl.load(weight + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(y + row * width + column, (normed * factor).to(y.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows"])
def _norm_backward(x, weight, rstd, g, dx, dweight, rows, width, programs, BLOCK: tl.constexpr):
    """dweight: float32 [programs, width], the part of each program."""
    program = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    mask = column < width
    factor = tl.load(weight + column, mask=mask, other=0.0).to(tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for row in range(program, rows, programs):
        place = tl.cast(row, tl.int64) * width + column
        scale = tl.load(rstd + row)
        normed = tl.load(x + place, mask=mask, other=0.0).to(tl.float32) * scale
        incoming = tl.load(g + place, mask=mask, other=0.0).to(tl.float32)
        total += incoming * normed.to(dx.dtype.element_ty).to(tl.float32)
        inner = incoming * factor
        slope = tl.sum(inner * normed, 0) / width
        tl.store(dx + place, (scale * (inner - normed * slope)).to(dx.dtype.element_ty), mask=mask)
    tl.store(dweight + tl.cast(program, tl.int64) * width + column, total, mask=mask)


def rms_norm_forward(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`x / sqrt(mean(x^2) + eps)`, rounded to x's dtype, `* weight`.

    Args:
        x: [rows, N], contiguous; weight: [N].

    Returns:
        y like x, and what the backward needs, float32 [rows].
    """
    rows, width = x.shape
    y, rstd = torch.empty_like(x), torch.empty(rows, dtype=torch.float32, device=x.device)
    if rows:
        block = triton.next_power_of_2(width)
        _norm_forward[(rows,)](x, weight, y, rstd, width, eps, BLOCK=block, num_warps=_warps(block))
    return y, rstd


def rms_norm_backward(x: Tensor, weight: Tensor, rstd: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of x and weight, in their dtypes, for the gradient `g` (contiguous) of `rms_norm_forward`'s y."""
    rows, width = x.shape
    dx = torch.empty_like(x)
    programs = max(1, min(rows, 4 * multiprocessors(x.device)))
    dweight = torch.empty((programs, width), dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(width)
    _norm_backward[(programs,)](
        x, weight, rstd, g, dx, dweight, rows, width, programs, BLOCK=block, num_warps=_warps(block)
    )
    return dx, dweight.sum(0).to(weight.dtype)


@triton.jit
def _silu_forward(gate, up, out, count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < count
    value = tl.load(gate + at, mask=mask, other=0.0).to(tl.float32)
    active = (value / (1.0 + tl.exp(-value))).to(out.dtype.element_ty).to(tl.float32)
    other = tl.load(up + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + at, (active * other).to(out.dtype.element_ty), mask=mask)


@triton.jit
def _silu_backward(gate, up, g, dgate, dup, count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < count
    value = tl.load(gate + at, mask=mask, other=0.0).to(tl.float32)
    other = tl.load(up + at, mask=mask, other=0.0).to(tl.float32)
    incoming = tl.load(g + at, mask=mask, other=0.0).to(tl.float32)
    part = 1.0 / (1.0 + tl.exp(-value))
    active = value * part
    slope = part * (1.0 + value * (1.0 - part))
    tl.store(dup + at, (incoming * active).to(dup.dtype.element_ty), mask=mask)
    tl.store(dgate + at, (incoming * other * slope).to(dgate.dtype.element_ty), mask=mask)


def silu_mul_forward(gate: Tensor, up: Tensor) -> Tensor:
    """`silu(gate)`, rounded to its dtype, `* up`; both contiguous and of one shape."""
    out = torch.empty_like(gate)
    if out.numel():
        _silu_forward[(triton.cdiv(out.numel(), 2048),)](gate, up, out, out.numel(), BLOCK=2048, num_warps=8)
    return out


def silu_mul_backward(gate: Tensor, up: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of gate and up for the gradient `g` (contiguous) of the product."""
    dgate, dup = torch.empty_like(gate), torch.empty_like(up)
    if g.numel():
        _silu_backward[(triton.cdiv(g.numel(), 2048),)](gate, up, g, dgate, dup, g.numel(), BLOCK=2048, num_warps=8)
    return dgate, dup


@triton.jit
def _row_sums(logits, largest, total, width, PART: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    inside = tl.arange(0, PART)
    peak = tl.full((PART,), float("-inf"), tl.float32)
    added = tl.zeros((PART,), tl.float32)
    for start in range(0, width, PART):
        value = tl.load(logits + row * width + start + inside, mask=start + inside < width, other=float("-inf"))
        value = value.to(tl.float32)
        higher = tl.maximum(peak, value)
        # A lane that has seen nothing but -inf has added nothing.
        shift = tl.where(higher == float("-inf"), 0.0, higher)
        added = added * tl.exp(peak - shift) + tl.exp(value - shift)
        peak = higher
    top = tl.max(peak, 0)
    shift = tl.where(top == float("-inf"), 0.0, top)
    tl.store(largest + row, top)
    tl.store(total + row, tl.sum(added * tl.exp(peak - shift), 0))


@triton.jit
def _softmax_gradient(logits, log_sum, column, mine, scale, out, width, PART: tl.constexpr):
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = part * PART + tl.arange(0, PART)
    mask = at < width
    value = tl.load(logits + row * width + at, mask=mask, other=0.0).to(tl.float32)
    slope = tl.exp(value - tl.load(log_sum + row))
    target = tl.where(tl.load(mine + row) != 0, tl.load(column + row), -1)
    slope = tl.where(at == target, slope - 1.0, slope)
    tl.store(out + row * width + at, (slope * tl.load(scale + row)).to(out.dtype.element_ty), mask=mask)


def row_sums(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Of each row of logits [N, V > 0], contiguous: the largest, and the sum of exp(logit - largest); float32 [N]."""
    rows, width = logits.shape
    largest, total = (torch.empty(rows, dtype=torch.float32, device=logits.device) for _ in range(2))
    if rows:
        _row_sums[(rows,)](logits, largest, total, width, PART=_PART, num_warps=8)
    return largest, total


def softmax_gradient(logits: Tensor, log_sum: Tensor, column: Tensor, mine: Tensor, scale: Tensor) -> Tensor:
    """`(exp(logits - log_sum) - [the column is the target's]) * scale`, like logits.

    Args:
        logits: [N, V > 0], contiguous.
        log_sum, scale: float32 [N].
        column: int64 [N], the target's place in the row; mine: bool [N], whether it has one.
    """
    rows, width = logits.shape
    out = torch.empty_like(logits)
    if rows:
        grid = (rows, triton.cdiv(width, _PART))
        _softmax_gradient[grid](
            logits, log_sum, column, mine.to(torch.int8), scale, out, width, PART=_PART, num_warps=8
        )
    return out


def _warps(block: int) -> int:
    return max(1, min(16, block // 256))
