"""Linear layers of one row and of a few by Triton, which reads a weight faster than the vendor's library does."""

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
from phalanx.ops.triton.linear_kernels import few_rows_kernel, one_row_kernel
from phalanx.ops.triton.support import early_launch, launches_early, multiprocessors


class RowTile(NamedTuple):
    """How the kernel is cut: output columns and K of a step, and the steps if the loop over them is written out."""

    columns: int
    inner: int
    warps: int
    steps: int


class RowsTile(NamedTuple):
    """How the kernel of a few rows is cut; see ``few_rows_kernel``."""

    rows: int
    columns: int
    inner: int
    stages: int
    swapped: bool
    prefetch: int = 0


def tile_for(in_features: int) -> RowTile:
    """The sizes that read a weight [.., in_features] fast: as measured on an H200."""
    inner = inner_step(in_features, 2048)
    steps = triton.cdiv(in_features, inner)
    return RowTile(2, inner, 8 if inner == 2048 and steps <= 4 else 4, steps if steps <= 8 else 0)


def rows_tile(rows: int, out_features: int, in_features: int, processors: int) -> RowsTile | None:
    """The sizes for a few rows, or None where the vendor's library is as fast: as measured on an H200, with Llama-8B's
    layers. It has kernels for each number of rows, so that own ones win where theirs fit best."""
    wide, deep = out_features >= 2 * 64 * processors, in_features >= 2 * out_features
    if in_features % 256 or out_features < 24 * processors:
        return None
    if rows <= 16:
        if deep and rows <= 8:
            return None
        if wide:
            return RowsTile(16, 128, 128, 4, True)
        if out_features <= in_features and rows > 4:
            return RowsTile(16, 32, 256, 6, False, 512)
        return RowsTile(16, 64, 128, 8, True)
    if rows <= 32:
        if deep:
            return None
        return RowsTile(32, 128, 128, 4, True) if wide else RowsTile(32, 64, 128, 6, True)
    if not 56 < rows <= 64:
        return None
    if wide:
        return RowsTile(64, 128, 64, 6, True)
    if out_features > in_features:
        return RowsTile(64, 64, 128, 5, False, 512)
    return RowsTile(64, 32, 256, 4, False, 512)


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


def few_rows(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    tile: RowsTile,
    scales: tuple[Tensor, Tensor] | None = None,
    gate: str | None = None,
    maxima: Tensor | None = None,
) -> Tensor:
    """`x @ weight.T + bias`.

    Args:
        x: [rows, in] of bf16 or fp16, or e4m3 numbers; rows dense.
        weight: [out, in] of x's dtype; rows dense.
        bias: [out].
        dtype: of the result.
        tile: the sizes.
        scales: what numbers are multiplied by: float32 [rows] and [out].
        gate: an activation as ``KINDS`` calls it; then outputs are gate | up.
        maxima: where the largest magnitudes of a gated row's parts go, float32 [rows, cdiv(out, tile.columns)].

    Returns:
        [rows, out], contiguous; with a gate, the gated activation [rows, out / 2].
    """
    (rows, in_features), out_features = x.shape, weight.shape[0]
    out = torch.empty((rows, out_features // 2 if gate else out_features), dtype=dtype, device=x.device)
    x_scale, scale = scales or (out, out)
    few_rows_kernel[triton.cdiv(out_features, tile.columns), triton.cdiv(rows, tile.rows)](
        x,
        x_scale,
        weight,
        scale,
        out if bias is None else bias,
        out,
        out if maxima is None else maxima,
        rows,
        out_features,
        in_features,
        x.stride(0),
        weight.stride(0),
        SCALED=scales is not None,
        BIASED=bias is not None,
        EVEN_K=in_features % tile.inner == 0,
        SWAPPED=tile.swapped,
        GATE=gate or "none",
        MAXIMA=maxima is not None,
        BLOCK_M=tile.rows,
        BLOCK_N=tile.columns,
        BLOCK_K=tile.inner,
        PREFETCH=tile.prefetch,
        STEP=128 // weight.element_size(),
        num_warps=4,
        num_stages=tile.stages,
        **early_launch(x.device),
    )
    return out


def gates(weight: PreparedWeight) -> bool:
    """Whether a weight's outputs may be gate | up."""
    return weight.out_features > 0 and weight.out_features % 2 == 0


def few_rows_tile(x: Tensor, weight: PreparedWeight) -> RowsTile | None:
    """The sizes where the kernel of a few rows is for such a product: x [rows, in] on a Hopper GPU, rows dense."""
    plain = x.dim() == 2 and x.stride(1) == 1 and x.dtype == weight.dtype and weight.data.stride(1) == 1
    if not plain or x.shape[1] != weight.in_features or x.shape[0] < 2 or not launches_early(x.device):
        return None
    return rows_tile(x.shape[0], weight.out_features, weight.in_features, multiprocessors(x.device))


class TritonLinear(PlainLinear):
    """The weight as it is: own kernels for one row and for a few, the vendor's library for the rest."""

    layout = "plain"

    def apply(self, x: Tensor, weight: PreparedWeight, bias: Tensor | None) -> Tensor:
        if takes(x, weight.data):
            return one_row(x, weight.data, bias)
        tile = few_rows_tile(x, weight)
        return F.linear(x, weight.data, bias) if tile is None else few_rows(x, weight.data, bias, x.dtype, tile)

    def apply_gated(self, x: Tensor, weight: PreparedWeight, bias: Tensor | None, activation: str) -> Tensor | None:
        """One row and a few; None for others."""
        gate = KINDS.get(activation)
        if gate is None or not gates(weight):
            return None
        if takes(x, weight.data):
            return one_row(x, weight.data, bias, gate=gate)
        tile = few_rows_tile(x, weight)
        return None if tile is None else few_rows(x, weight.data, bias, x.dtype, tile, gate=gate)

    def apply_wide(self, x: Tensor, weight: PreparedWeight, bias: Tensor | None) -> Tensor:
        if takes(x, weight.data):
            return one_row(x, weight.data, bias, torch.float32)
        out = torch.mm(x.reshape(-1, x.shape[-1]), weight.data.T, out_dtype=torch.float32)
        return (out if bias is None else out + bias).view(*x.shape[:-1], weight.out_features)


def supports(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the kernel can run tensors of this dtype on this device."""
    return device.type == "cuda" and dtype in (torch.bfloat16, torch.float16)


registry.register("linear", "triton", TritonLinear(), supports=supports, priority=10)
