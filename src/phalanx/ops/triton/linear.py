"""Linear layers with one row by Triton, which reads a weight faster than the vendor's library does."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
from torch import Tensor
from torch.nn import functional as F

from phalanx.ops import registry
from phalanx.ops.linear import PlainLinear, PreparedWeight
from phalanx.ops.triton.activation_kernels import KINDS
from phalanx.ops.triton.linear_kernels import one_row_kernel
from phalanx.ops.triton.support import early_launch


class RowTile(NamedTuple):
    """How the kernel is cut: output columns and K of a step, and the steps if the loop over them is written out."""

    columns: int
    inner: int
    warps: int
    steps: int


def tile_for(in_features: int) -> RowTile:
    """The sizes that read a weight [.., in_features] fast: as measured on an H200."""
    inner = inner_step(in_features, 2048)
    steps = triton.cdiv(in_features, inner)
    return RowTile(2, inner, 8 if inner == 2048 and steps <= 4 else 4, steps if steps <= 8 else 0)


def inner_step(in_features: int, largest: int) -> int:
    """A step of K that divides it if a good one does, else the largest."""
    divisor = math.gcd(in_features, largest)
    return divisor if divisor >= 128 else min(largest, max(32, triton.next_power_of_2(in_features)))


def power_below(number: int) -> int:
    """The largest power of two that is at most `number`, 0 where that is not worth a prefetch."""
    return 1 << (number.bit_length() - 1) if number >= 64 else 0


def takes(x: Tensor, weight: Tensor) -> bool:
    """Whether the kernel is for such a product: one row of bf16 or fp16, rows of the weight dense."""
    return (
        x.numel() == x.shape[-1] > 0
        and weight.shape[0] > 0
        and x.dtype == weight.dtype
        and x.dtype in (torch.bfloat16, torch.float16)
        and weight.stride(1) == 1
    )


def one_row(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype | None = None,
    tile: RowTile | None = None,
    *,
    scale: Tensor | None = None,
    gate: str | None = None,
) -> Tensor:
    """`x @ weight.T + bias`.

    Args:
        x: [..., in] of bf16 or fp16 that holds one row.
        weight: [out, in], rows dense; of x's dtype, or int8 or e4m3 numbers with a `scale`.
        bias: [out].
        dtype: of the result; x's if None.
        tile: other sizes than those of ``tile_for``.
        scale: float32 [out], what the numbers of the weight are multiplied by.
        gate: an activation as ``KINDS`` calls it; then outputs are gate | up.

    Returns:
        [..., out], contiguous; with a gate, the gated activation [..., out / 2].
    """
    out_features, in_features = weight.shape
    if x.shape[-1] != in_features:
        raise ValueError(f"linear: the weight takes [..., {in_features}]; x is {tuple(x.shape)}")
    row = x if x.stride(-1) == 1 else x.contiguous()
    width = out_features // 2 if gate else out_features
    out = torch.empty((*x.shape[:-1], width), dtype=dtype or x.dtype, device=x.device)
    tile = tile or tile_for(in_features)
    one_row_kernel[(triton.cdiv(out_features, tile.columns),)](
        row,
        weight,
        out if scale is None else scale,
        out if bias is None else bias,
        out,
        out_features,
        in_features,
        weight.stride(0),
        SCALED=scale is not None,
        BIASED=bias is not None,
        EVEN_K=in_features % tile.inner == 0,
        GATE=gate or "none",
        BLOCK_N=tile.columns,
        BLOCK_K=tile.inner,
        STEPS=tile.steps,
        num_warps=tile.warps,
        **early_launch(x.device),
    )
    return out


def gates(weight: PreparedWeight) -> bool:
    """Whether a weight's outputs may be gate | up."""
    return weight.out_features > 0 and weight.out_features % 2 == 0


class TritonLinear(PlainLinear):
    """The weight as it is: an own kernel for one row, the vendor's library for the rest."""

    layout = "plain"

    def apply(self, x: Tensor, weight: PreparedWeight, bias: Tensor | None) -> Tensor:
        return one_row(x, weight.data, bias) if takes(x, weight.data) else F.linear(x, weight.data, bias)

    def apply_gated(self, x: Tensor, weight: PreparedWeight, bias: Tensor | None, activation: str) -> Tensor | None:
        """One row; None for others."""
        gate = KINDS.get(activation)
        if gate is None or not gates(weight) or not takes(x, weight.data):
            return None
        return one_row(x, weight.data, bias, gate=gate)

    def apply_wide(self, x: Tensor, weight: PreparedWeight, bias: Tensor | None) -> Tensor:
        if takes(x, weight.data):
            return one_row(x, weight.data, bias, torch.float32)
        out = torch.mm(x.reshape(-1, x.shape[-1]), weight.data.T, out_dtype=torch.float32)
        return (out if bias is None else out + bias).view(*x.shape[:-1], weight.out_features)


def supports(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the kernel can run tensors of this dtype on this device."""
    return device.type == "cuda" and dtype in (torch.bfloat16, torch.float16)


registry.register("linear", "triton", TritonLinear(), supports=supports, priority=10)
