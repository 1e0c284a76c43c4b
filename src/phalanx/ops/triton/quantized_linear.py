"""Products of 16-bit rows with weights in few bits on CUDA: few rows by own kernels, many by the vendor's library."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from phalanx.ops import registry
from phalanx.ops.linear import PreparedWeight
from phalanx.ops.quantized import Fp8WeightLinear, Int4Linear, Int8Linear, QuantizedLinear
from phalanx.ops.triton.activation_kernels import KINDS
from phalanx.ops.triton.linear import gates, inner_step, one_row, power_below, supports
from phalanx.ops.triton.quantized_kernels import (
    byte_rows_kernel,
    int4_rows_kernel,
    restore_byte_kernel,
    restore_int4_kernel,
)
from phalanx.ops.triton.support import dense_rows, early_launch, launches_early, multiprocessors

WEIGHT_ONLY_ROWS = {"fp8_weights": 64, "int8": 64, "int4": 16}
"""Rows up to which weights are widened in registers; above, once, before the library's product. On an H200 that is as
fast as far as this for int8 and int4; e4m3 weights, which have int8's kernels, were not measured."""


class Tile(NamedTuple):
    """How the kernels are cut: output columns and K of a step, and how far ahead weights are brought in before the
    wait."""

    columns: int
    inner: int
    warps: int
    stages: int
    prefetch: int = 0


def tile_for(rows: int, out_features: int, in_features: int, processors: int) -> Tile:
    """The sizes that read a weight of a byte [out_features, in_features] fast for so many rows."""
    columns = 64 if out_features >= 64 * 3 * processors else 32 if out_features >= 32 * processors else 16
    # A line of the cache holds 128 weights: less is not worth a prefetch.
    prefetch = min(2048, power_below(in_features)) if in_features >= 128 else 0
    return Tile(columns, inner_step(in_features, 256 if rows <= 32 else 128), 4, 5, prefetch)


def few_rows(x: Tensor, weight: PreparedWeight, bias: Tensor | None, tile: Tile | None = None) -> Tensor:
    """x [rows, in], rows dense, times a weight in one of the layouts -> [rows, out] of the weight's dtype."""
    rows, in_features, out_features = x.shape[0], weight.in_features, weight.out_features
    out = torch.empty((rows, out_features), dtype=weight.dtype, device=x.device)
    tile = tile or tile_for(rows, out_features, in_features, multiprocessors(x.device))
    height = 16 if rows <= 16 else 32 if rows <= 32 or weight.layout == "int4" else 64
    if weight.layout == "int4" and height == 32:
        # Four products a step need many registers.
        tile = tile._replace(warps=8, stages=min(tile.stages, 4))
    grid = (triton.cdiv(out_features, tile.columns), triton.cdiv(rows, height))
    shift = out if bias is None else bias
    constants: dict[str, Any] = {
        "BIASED": bias is not None,
        "BLOCK_M": height,
        "BLOCK_N": tile.columns,
        "PREFETCH": tile.prefetch,
        "num_warps": tile.warps,
        "num_stages": tile.stages,
        **early_launch(x.device),
    }
    if weight.layout == "int4":
        scale, offset = weight.aux["scale"], weight.aux["offset"]
        int4_rows_kernel[grid](
            x, weight.data, scale, offset, shift, out, rows, out_features, in_features, x.stride(0),
            weight.data.stride(0), GROUP=in_features // scale.shape[0], **constants,
        )  # fmt: skip
    else:
        byte_rows_kernel[grid](
            x, weight.data, weight.aux["scale"], shift, out, rows, out_features, in_features, x.stride(0),
            weight.data.stride(0), EVEN_K=in_features % tile.inner == 0, BLOCK_K=tile.inner, **constants,
        )  # fmt: skip
    return out


def restore_int4(weight: PreparedWeight) -> Tensor:
    """What an int4 weight stands for, [out, in], in one kernel."""
    n, k = weight.out_features, weight.in_features
    out = torch.empty((n, k), dtype=weight.dtype, device=weight.data.device)
    scale, offset = weight.aux["scale"], weight.aux["offset"]
    group = k // scale.shape[0]
    if n:
        restore_int4_kernel[k // group // 2, triton.cdiv(n, 32)](
            weight.data, scale, offset, out, n, k, GROUP=group, BLOCK_N=32, NATIVE=launches_early(out.device)
        )
    return out


def restore_bytes(weight: PreparedWeight) -> Tensor:
    """What an int8 or e4m3 weight stands for, [out, in], in one kernel."""
    n, k = weight.out_features, weight.in_features
    out = torch.empty((n, k), dtype=weight.dtype, device=weight.data.device)
    if out.numel():
        restore_byte_kernel[triton.cdiv(k, 1024), triton.cdiv(n, 4)](
            weight.data, weight.aux["scale"], out, n, k, BLOCK_N=4, BLOCK_K=1024
        )
    return out


class Widened(QuantizedLinear):
    """Weights widened in registers for few rows, as a whole for many."""

    def restore(self, weight: PreparedWeight) -> Tensor:
        return restore_int4(weight) if weight.layout == "int4" else restore_bytes(weight)

    def apply(self, x: Tensor, weight: PreparedWeight, bias: Tensor | None) -> Tensor:
        return _weight_only(x, weight, bias) if _is_few(x, weight) else super().apply(x, weight, bias)

    def apply_gated(self, x: Tensor, weight: PreparedWeight, bias: Tensor | None, activation: str) -> Tensor | None:
        """One row, of numbers of a byte; None for others."""
        rows, gate = dense_rows(x, weight), KINDS.get(activation)
        if rows.shape[0] != 1 or gate is None or weight.layout == "int4" or not weight.in_features or not gates(weight):
            return None
        out = one_row(rows, weight.data, bias, scale=weight.aux["scale"], gate=gate)
        return out.view(*x.shape[:-1], weight.out_features // 2)


class TritonFp8Weights(Widened, Fp8WeightLinear):
    """e4m3 numbers."""


class TritonInt8(Widened, Int8Linear):
    """Whole numbers of a byte."""


class TritonInt4(Widened, Int4Linear):
    """Numbers of four bits."""


def _is_few(x: Tensor, weight: PreparedWeight) -> bool:
    rows = x.shape[:-1].numel()
    return 0 < rows <= WEIGHT_ONLY_ROWS[weight.layout] and weight.out_features > 0 and weight.in_features > 0


def _weight_only(x: Tensor, weight: PreparedWeight, bias: Tensor | None) -> Tensor:
    rows = dense_rows(x, weight)
    if rows.shape[0] == 1 and weight.layout != "int4":
        return one_row(rows, weight.data, bias, scale=weight.aux["scale"]).view(*x.shape[:-1], weight.out_features)
    return few_rows(rows, weight, bias).view(*x.shape[:-1], weight.out_features)


def reads_e4m3(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the kernels can read e4m3 numbers as well: Triton has them on GPUs since Ada (8.9), and on older ones the
    plain back end multiplies. Asked where there is no GPU, it is of a new one."""
    return supports(device, dtype) and not (
        torch.cuda.is_available() and torch.cuda.get_device_capability(device) < (8, 9)
    )


for _backend, _supports in ((TritonFp8Weights(), reads_e4m3), (TritonInt8(), supports), (TritonInt4(), supports)):
    registry.register("linear", f"{_backend.layout}_triton", _backend, supports=_supports, priority=-10)
