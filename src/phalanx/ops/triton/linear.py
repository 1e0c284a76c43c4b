"""Linear layers with few rows by Triton: they read a weight faster than the vendor's library does."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
from torch import Tensor
from torch.nn import functional as F

from phalanx.ops import registry
from phalanx.ops.activation import gated_activation
from phalanx.ops.linear import PlainLinear, PreparedWeight, linear
from phalanx.ops.triton.linear_kernels import few_rows_kernel, one_row_kernel
from phalanx.ops.triton.support import launches_early, multiprocessors

MAX_ROWS = 1
"""Rows above which the vendor's library is left to it."""


class Tile(NamedTuple):
    """How a kernel is cut: output columns and K of a step, and how far ahead weights are brought in before the wait."""

    columns: int
    inner: int
    warps: int
    stages: int
    prefetch: int = 0


def tile_for(rows: int, out_features: int, in_features: int, processors: int) -> Tile:
    """The sizes that read a weight [out_features, in_features] fast for so many rows of x."""
    if rows == 1:
        inner = inner_step(in_features, 2048)
        columns = 2 if out_features <= 8 * 2 * processors or in_features > 8192 else 4
        return Tile(columns, inner, 4, 1 if in_features <= 4096 else 2, min(2048, power_below(in_features)))
    # Narrow enough that every processor has a program, wide enough that x is not read more than W.
    columns = 64 if out_features >= 64 * 4 * processors else 32 if out_features >= 32 * processors else 16
    if rows > 16:
        columns = max(columns, 32)
    inner = inner_step(in_features, 256 if rows <= 32 and columns <= 32 else 128)
    return Tile(columns, inner, 4, 4, min(1024, power_below(in_features)))


def inner_step(in_features: int, largest: int) -> int:
    """A step of K that divides it if a good one does, else the largest."""
    divisor = math.gcd(in_features, largest)
    return divisor if divisor >= 128 else min(largest, max(32, triton.next_power_of_2(in_features)))


def power_below(number: int) -> int:
    """The largest power of two that is at most `number`, 0 where that is not worth a prefetch."""
    return 1 << (number.bit_length() - 1) if number >= 64 else 0


def takes(x: Tensor, weight: Tensor) -> bool:
    """Whether the kernels are for such a product: 1 to MAX_ROWS rows of bf16 or fp16 with dense rows."""
    rows = x.numel() // x.shape[-1] if x.shape[-1] else 0
    return (
        0 < rows <= MAX_ROWS
        and weight.shape[0] > 0
        and x.dtype == weight.dtype
        and x.dtype in (torch.bfloat16, torch.float16)
        and weight.stride(1) == 1
    )


def few_rows(x: Tensor, weight: Tensor, bias: Tensor | None, gated: bool = False, tile: Tile | None = None) -> Tensor:
    """`x @ weight.T + bias`; gated: `silu(gate) * up` of a weight that is gate above up.

    Args:
        x: [..., in] of bf16 or fp16, with at least one row.
        weight: [out, in], or [2 out, in] where gated, rows dense.
        bias: [out]; None where gated.
        tile: other sizes than those of ``tile_for``.

    Returns:
        [..., out], contiguous.
    """
    in_features = weight.shape[1]
    if x.shape[-1] != in_features:
        raise ValueError(f"linear: the weight takes [..., {in_features}]; x is {tuple(x.shape)}")
    rows = x if x.dim() == 2 else x.reshape(-1, in_features)
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    count = rows.shape[0]
    out_features = weight.shape[0] // 2 if gated else weight.shape[0]
    out = torch.empty((*x.shape[:-1], out_features), dtype=x.dtype, device=x.device)
    if tile is None:
        tile = tile_for(count, weight.shape[0], in_features, multiprocessors(x.device))
        if gated:
            # A program reads two parts of the weight.
            tile = tile._replace(columns=max(1 if count == 1 else 16, tile.columns // 2))
    early = launches_early(x.device)
    constants = {
        "GATED": gated,
        "BIASED": bias is not None,
        "EVEN_K": in_features % tile.inner == 0,
        "BLOCK_N": tile.columns,
        "BLOCK_K": tile.inner,
        "PDL": early,
        "PREFETCH": tile.prefetch,
        "STEP": 64,
        "num_warps": tile.warps,
    }
    if early:
        constants["launch_pdl"] = True
    grid = triton.cdiv(out_features, tile.columns)
    shift = out if bias is None else bias
    if count == 1:
        one_row_kernel[(grid,)](
            rows, weight, shift, out, out_features, in_features, weight.stride(0), STAGES=tile.stages, **constants
        )
    else:
        height = 16 if count <= 16 else 32 if count <= 32 else 64
        few_rows_kernel[grid, triton.cdiv(count, height)](
            rows, weight, shift, out, count, out_features, in_features, rows.stride(0), weight.stride(0),
            BLOCK_M=height, num_stages=tile.stages, **constants,
        )  # fmt: skip
    return out


class TritonLinear(PlainLinear):
    """The weight as it is: own kernels for few rows, `F.linear` for the rest and for float32."""

    layout = "plain"

    def apply(self, x: Tensor, weight: PreparedWeight, bias: Tensor | None) -> Tensor:
        return few_rows(x, weight.data, bias) if takes(x, weight.data) else F.linear(x, weight.data, bias)


def gated_linear(x: Tensor, weight: PreparedWeight, activation: str) -> Tensor:
    """See `phalanx.ops.linear.gated_linear`: for few rows one kernel, which rounds gate and up as the two ops do."""
    fused = activation in ("silu", "swish") and isinstance(weight.backend, TritonLinear) and takes(x, weight.data)
    return few_rows(x, weight.data, None, gated=True) if fused else gated_activation(linear(x, weight), activation)


def supports(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the kernels can run tensors of this dtype on this device."""
    return device.type == "cuda" and dtype in (torch.bfloat16, torch.float16)


registry.register("linear", "triton", TritonLinear(), supports=supports, priority=10)
registry.register("gated_linear", "triton", gated_linear, supports=supports, priority=10)
