"""Products of e4m3 rows with e4m3 weights on CUDA: few rows by own kernels, many by the vendor's library."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from torch.nn import functional as F

from phalanx.ops import registry
from phalanx.ops.linear import PreparedWeight
from phalanx.ops.quantized import Fp8Linear
from phalanx.ops.triton import linear
from phalanx.ops.triton.activation_kernels import KINDS
from phalanx.ops.triton.fp8_kernels import IN_HALF as _IN_HALF
from phalanx.ops.triton.fp8_kernels import fp8_row_kernel, quantize_part_kernel, quantize_rows_kernel
from phalanx.ops.triton.fp8_rows import Fp8Rows, leave, left_beside
from phalanx.ops.triton.linear import RowsTile, gates, inner_step, power_below, supports
from phalanx.ops.triton.support import dense_rows, early_launch, launches_early, multiprocessors

IN_HALF = int(_IN_HALF.value)
FEW_ROWS = 64
"""Rows up to which own kernels read a weight faster than the library's scaled product."""
FEW_ROWS_ODD = 128
"""The same where the library takes no such shape."""
WIDEST = 1 << 14
"""The widest row that a program holds at once."""


class Fp8RowTile(NamedTuple):
    """How one row's kernel is cut: columns of y, K of a step, steps if the loop over them is written out, and how far
    ahead weights are brought in before the wait where it is not."""

    columns: int
    inner: int
    steps: int
    prefetch: int
    warps: int = 4


def row_tile(in_features: int) -> Fp8RowTile:
    """The sizes that read a weight [.., in_features] fast for one row: as measured on an H200."""
    inner = inner_step(in_features, 2048)
    steps = triton.cdiv(in_features, inner)
    if steps <= IN_HALF:
        return Fp8RowTile(2, inner, steps, 0)
    return Fp8RowTile(4, inner, 0, min(2048, power_below(in_features)))


def rows_tile(rows: int, out_features: int, in_features: int, processors: int) -> RowsTile:
    """The sizes for some rows: as measured on an H200."""
    # A line of the cache holds 128 weights: less is not worth a prefetch.
    prefetch = min(2048, power_below(in_features)) if in_features >= 128 else 0
    if rows <= 32:
        return RowsTile(16 if rows <= 16 else 32, 64, inner_step(in_features, 512), 3, True, prefetch)
    if out_features >= 2 * 64 * processors:
        return RowsTile(64, 64, inner_step(in_features, 128), 6, True, prefetch)
    if out_features < 40 * processors:
        return RowsTile(64, 32, inner_step(in_features, 512), 4, False, prefetch)
    return RowsTile(64, 64, inner_step(in_features, 256), 5, False, prefetch)


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """`phalanx.ops.quantized.quantize_fp8` of x [rows, k], rows dense, in one kernel."""
    rows, k = x.shape
    numbers = torch.empty((rows, k), dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(rows, dtype=torch.float32, device=x.device)
    if rows:
        block = max(16, min(WIDEST, triton.next_power_of_2(k)))
        warps = 16 if block > 4096 or rows <= 64 else 8
        quantize_rows_kernel[(rows,)](
            x, numbers, scales, k, x.stride(0), BLOCK=block, ONCE=k <= block, num_warps=warps, **early_launch(x.device)
        )
    return numbers, scales


def quantize_by_maxima(x: Tensor, maxima: Tensor) -> tuple[Tensor, Tensor]:
    """`quantize_rows` of a dense x [rows, k] whose parts have the largest magnitudes maxima float32 [rows, parts]."""
    rows, k = x.shape
    numbers = torch.empty((rows, k), dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(rows, dtype=torch.float32, device=x.device)
    quantize_part_kernel[rows, triton.cdiv(k, 2048)](
        x, maxima, numbers, scales, k, x.stride(0), maxima.shape[1],
        BLOCK=2048, COUNT=triton.next_power_of_2(maxima.shape[1]), num_warps=8, **early_launch(x.device),
    )  # fmt: skip
    return numbers, scales


def one_row(
    numbers: Tensor,
    x_scale: Tensor,
    weight: PreparedWeight,
    bias: Tensor | None,
    tile: Fp8RowTile | None = None,
    gate: str | None = None,
) -> Tensor:
    """A row times a weight in the layout fp8.

    Args:
        numbers: e4m3 [1, in].
        x_scale: its scale, float32 [1].
        weight: of the layout fp8.
        bias: [out].
        tile: other sizes than those of ``row_tile``.
        gate: an activation as ``KINDS`` calls it; then outputs are gate | up.

    Returns:
        [1, out] of the weight's dtype; with a gate, the gated activation [1, out / 2], and it quantised beside it.
    """
    in_features, out_features = weight.in_features, weight.out_features
    width = out_features // 2 if gate else out_features
    out = torch.empty((1, width), dtype=weight.dtype, device=numbers.device)
    tile = tile or row_tile(in_features)
    programs = triton.cdiv(out_features, tile.columns)
    maxima = torch.empty((1, programs), dtype=torch.float32, device=out.device) if gate else out
    fp8_row_kernel[(programs,)](
        numbers,
        x_scale,
        weight.data,
        weight.aux["scale"],
        out if bias is None else bias,
        out,
        maxima,
        out_features,
        in_features,
        weight.data.stride(0),
        BIASED=bias is not None,
        EVEN_K=in_features % tile.inner == 0,
        STEPS=tile.steps,
        ONCE=in_features <= IN_HALF * tile.inner,
        GATE=gate or "none",
        BLOCK_N=tile.columns,
        BLOCK_K=tile.inner,
        PREFETCH=tile.prefetch,
        num_warps=tile.warps,
        **early_launch(out.device),
    )
    return leave(out, Fp8Rows(*quantize_by_maxima(out, maxima))) if gate else out


def few_rows(
    numbers: Tensor, x_scale: Tensor, weight: PreparedWeight, bias: Tensor | None, gate: str | None = None
) -> Tensor:
    """numbers e4m3 [rows, in] with their scales [rows], times an fp8 weight: as `one_row`."""
    rows, device = numbers.shape[0], numbers.device
    tile = rows_tile(rows, weight.out_features, weight.in_features, multiprocessors(device))
    scales = (x_scale, weight.aux["scale"])
    if gate is None:
        return linear.few_rows(numbers, weight.data, bias, weight.dtype, tile, scales)
    maxima = torch.empty((rows, triton.cdiv(weight.out_features, tile.columns)), dtype=torch.float32, device=device)
    out = linear.few_rows(numbers, weight.data, bias, weight.dtype, tile, scales, gate, maxima)
    return leave(out, Fp8Rows(*quantize_by_maxima(out, maxima)))


class TritonFp8(Fp8Linear):
    """Activations are quantised in one kernel; then own kernels for few rows, `torch._scaled_mm` for many."""

    def apply(self, x: Tensor, weight: PreparedWeight, bias: Tensor | None) -> Tensor:
        rows = dense_rows(x, weight)
        if not rows.shape[0] or not weight.out_features or not weight.in_features:
            return super().apply(x, weight, bias)
        numbers, scale = left_beside(x) or quantize_rows(rows)
        return self._product(numbers, scale, weight, bias).view(*x.shape[:-1], weight.out_features)

    def apply_gated(self, x: Tensor, weight: PreparedWeight, bias: Tensor | None, activation: str) -> Tensor | None:
        """Where own kernels multiply, with the result quantised beside it; None for others."""
        rows, gate = dense_rows(x, weight), KINDS.get(activation)
        if gate is None or not weight.in_features or not gates(weight) or not self._is_few(rows, weight):
            return None
        out = _own(*(left_beside(x) or quantize_rows(rows)), weight, bias, gate)
        # A view would have nothing beside it.
        return out if x.dim() == 2 else out.view(*x.shape[:-1], weight.out_features // 2)

    def _is_few(self, rows: Tensor, weight: PreparedWeight) -> bool:
        # Tiles of several rows need the shared memory of a Hopper GPU; interpreted, they need none.
        fits = launches_early(rows.device) or not (_aligned(weight) or rows.is_cuda)
        most = FEW_ROWS if _aligned(weight) else FEW_ROWS_ODD
        return rows.shape[0] == 1 or (fits and 1 < rows.shape[0] <= most)

    def _product(self, numbers: Tensor, scale: Tensor, weight: PreparedWeight, bias: Tensor | None) -> Tensor:
        if self._is_few(numbers, weight):
            return _own(numbers, scale, weight, bias)
        if not _aligned(weight):
            restored = (numbers.float() * scale[:, None]).to(weight.dtype)
            return F.linear(restored, self.restore(weight), bias)
        scales: dict[str, Any] = {"scale_a": scale[:, None], "scale_b": weight.aux["scale"][None, :]}
        return torch._scaled_mm(numbers, weight.data.T, **scales, bias=bias, out_dtype=torch.bfloat16)


def _own(
    numbers: Tensor, scale: Tensor, weight: PreparedWeight, bias: Tensor | None, gate: str | None = None
) -> Tensor:
    product = one_row if numbers.shape[0] == 1 else few_rows
    return product(numbers, scale, weight, bias, gate=gate)


def _aligned(weight: PreparedWeight) -> bool:
    """Whether the library has a product of such sizes."""
    return weight.dtype == torch.bfloat16 and weight.in_features % 16 == 0 and weight.out_features % 16 == 0


registry.register("linear", "fp8_triton", TritonFp8(), supports=supports, priority=-10)
