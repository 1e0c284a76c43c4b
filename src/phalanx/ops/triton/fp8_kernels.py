"""Triton kernels of e4m3 numbers: rows are quantised, and multiplied with weights of the same kind."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from phalanx.ops.triton.activation_kernels import activate
from phalanx.ops.triton.linear_kernels import columns_of, prefetch, row_part, store_gated, x_part

# Products that are summed in fp16 before they go to a sum in fp32.
IN_HALF = tl.constexpr(8)


@triton.jit
def scale_of(largest):
    """What e4m3 numbers up to 448 are multiplied by to reach `largest`; 1 for 0."""
    scale = tl.div_rn(largest, 448.0)
    return tl.where(scale > 0.0, scale, 1.0)


@triton.jit
def to_e4m3(value, scale):
    """float32 -> e4m3, `scale` times which is near it; NaN stays NaN."""
    return tl.clamp(tl.div_rn(value, scale), -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL).to(tl.float8e4nv)


@triton.jit
def quantize_rows_kernel(x, numbers, scales, k, x_stride, BLOCK: tl.constexpr, ONCE: tl.constexpr, PDL: tl.constexpr):
    """x [rows, k] -> e4m3 numbers [rows, k], dense, float32 scales [rows]; grid (rows,). ONCE: k fits into BLOCK."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    if ONCE:
        value = tl.load(x + row * x_stride + columns, mask=columns < k, other=0.0).to(tl.float32)
        scale = scale_of(tl.max(tl.abs(value), 0))
        tl.store(numbers + row * k + columns, to_e4m3(value, scale), mask=columns < k)
    else:
        largest = tl.zeros((BLOCK,), tl.float32)
        for start in tl.range(0, k, BLOCK):
            at = start + columns
            value = tl.load(x + row * x_stride + at, mask=at < k, other=0.0).to(tl.float32)
            largest = tl.maximum(largest, tl.abs(value))
        scale = scale_of(tl.max(largest, 0))
        for start in tl.range(0, k, BLOCK):
            at = start + columns
            value = tl.load(x + row * x_stride + at, mask=at < k, other=0.0).to(tl.float32)
            tl.store(numbers + row * k + at, to_e4m3(value, scale), mask=at < k)
    tl.store(scales + row, scale)


@triton.jit
def quantize_part_kernel(
    x, maxima, numbers, scales, k, x_stride, count, BLOCK: tl.constexpr, COUNT: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """`quantize_rows_kernel` where the largest magnitudes of `count` parts of a row are known: maxima float32 [rows,
    count]; grid (rows, cdiv(k, BLOCK)). COUNT: a power of two that holds them."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, COUNT)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + row * x_stride + columns, mask=columns < k, other=0.0).to(tl.float32)
    scale = scale_of(tl.max(tl.load(maxima + row * count + part, mask=part < count, other=0.0), 0))
    tl.store(numbers + row * k + columns, to_e4m3(value, scale), mask=columns < k)
    if tl.program_id(1) == 0:
        tl.store(scales + row, scale)


@triton.jit
def gated_fp8_kernel(
    x, out, numbers, scales, row_stride, width, KIND: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """A gated activation, and its rows as e4m3 numbers [rows, width] and scales [rows]; grid (rows,)."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < width
    value = activate(tl.load(x + row * row_stride + column, mask=mask, other=0.0).to(tl.float32), KIND)
    value *= tl.load(x + row * row_stride + width + column, mask=mask, other=0.0).to(tl.float32)
    result = value.to(out.dtype.element_ty)
    tl.store(out + row * width + column, result, mask=mask)
    wide = tl.where(mask, result.to(tl.float32), 0.0)
    scale = scale_of(tl.max(tl.abs(wide), 0))
    tl.store(scales + row, scale)
    tl.store(numbers + row * width + column, to_e4m3(wide, scale), mask=mask)


@triton.jit
def multiply_add(w, x, acc, NATIVE: tl.constexpr):
    """acc + w * x; w e4m3, x fp16. NATIVE: two at a time, in fp16."""
    if not NATIVE:
        return acc + w.to(tl.float32) * x.to(tl.float32)
    return tl.inline_asm_elementwise(
        """{
        .reg .b16 low, high;
        .reg .b32 a, b;
        mov.b32 {low, high}, $2;
        cvt.rn.f16x2.e4m3x2 a, low;
        cvt.rn.f16x2.e4m3x2 b, high;
        fma.rn.f16x2 $0, a, $3, $5;
        fma.rn.f16x2 $1, b, $4, $6;
        }""",
        "=r,=r,r,r,r,r,r", [w, x, acc], dtype=tl.float16, is_pure=True, pack=4,
    )  # fmt: skip


@triton.jit
def small_part(x, at, k, EVEN_K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """fp16 [BLOCK_N, BLOCK_K]: 1/512 of the elements `at` of the row x, for each output. All e4m3 numbers are fp16
    numbers, and so are these parts of them; products stay below fp16's largest."""
    row = x_part(x, at, k, EVEN_K).to(tl.float16) * 0.001953125
    return tl.broadcast_to(row[None, :], (BLOCK_N, BLOCK_K))


@triton.jit
def few_products(
    x, rows, ahead, first, last, k,
    STEPS: tl.constexpr, AHEAD: tl.constexpr, EVEN_K: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """float32 [BLOCK_N, BLOCK_K]: what columns `first` to `last` of x and w add to each place, IN_HALF steps at most.

    STEPS: how many steps these are, 0 where that is not known when this is compiled. AHEAD: the first part is `ahead`.
    """
    inner = tl.arange(0, BLOCK_K)
    half = tl.zeros((BLOCK_N, BLOCK_K), tl.float16 if NATIVE else tl.float32)
    if STEPS > 0:
        for step in tl.static_range(STEPS):
            at = first + step * BLOCK_K + inner
            part = row_part(rows, at, k, EVEN_K)
            if AHEAD and step == 0:
                part = ahead
            half = multiply_add(part, small_part(x, at, k, EVEN_K, BLOCK_N, BLOCK_K), half, NATIVE)
    else:
        for start in tl.range(first, last, BLOCK_K):
            at = start + inner
            part = row_part(rows, at, k, EVEN_K)
            half = multiply_add(part, small_part(x, at, k, EVEN_K, BLOCK_N, BLOCK_K), half, NATIVE)
    return half.to(tl.float32)


@triton.jit
def fp8_row_kernel(
    x, x_scale, w, scale, bias, y, maxima, n, k, w_stride,
    BIASED: tl.constexpr, EVEN_K: tl.constexpr, STEPS: tl.constexpr, ONCE: tl.constexpr, GATE: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr, PREFETCH: tl.constexpr,
):  # fmt: skip
    """One row: x e4m3 [k], x_scale float32 [1], w e4m3 [n, k], scale float32 [n] -> y [n]; grid (cdiv(n, BLOCK_N),).

    Up to IN_HALF products are summed in fp16 before they go to fp32: with fewer conversions, memory is the limit. Such
    a sum is wrong by half of its last bit, 2^-11 of it, a fourth of what the result is rounded by in bf16.
    STEPS: cdiv(k, BLOCK_K) where that is small; then the first weights are read before the kernel ahead has ended.
    ONCE: all of k fits into one such sum. GATE: an activation, or "none"; with one, outputs are gate | up, y [n / 2] is
    the gated activation of them, and maxima float32 [programs] are its largest magnitudes.
    """
    columns, inside = columns_of(n, BLOCK_N, GATE)
    rows = w + tl.minimum(columns, n - 1).to(tl.int64) * w_stride
    inner = tl.arange(0, BLOCK_K)
    factor = tl.load(scale + columns, mask=inside, other=0.0)
    if STEPS > 0:
        ahead = row_part(rows, inner, k, EVEN_K)
    elif PDL and PREFETCH > 0:
        prefetch(rows, k, BLOCK_N, PREFETCH, 128)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    factor *= tl.load(x_scale) * 512.0
    if STEPS > 0:
        acc = few_products(x, rows, ahead, 0, k, k, STEPS, True, EVEN_K, BLOCK_N, BLOCK_K, PDL)
    elif ONCE:
        acc = few_products(x, rows, rows, 0, k, k, 0, False, EVEN_K, BLOCK_N, BLOCK_K, PDL)
    else:
        acc = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
        for first in tl.range(0, k, IN_HALF * BLOCK_K):
            last = tl.minimum(first + IN_HALF * BLOCK_K, k)
            acc += few_products(x, rows, rows, first, last, k, 0, False, EVEN_K, BLOCK_N, BLOCK_K, PDL)
    total = tl.sum(acc, 1) * factor
    if BIASED:
        total += tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
    if GATE == "none":
        tl.store(y + columns, total.to(y.dtype.element_ty), mask=inside)
    else:
        result = store_gated(y, total, n, GATE, BLOCK_N)
        tl.store(maxima + tl.program_id(0), tl.max(tl.abs(result), 0))
