"""Triton kernels of products with quantised weights; few rows are read in fewer bits, and widened in registers."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from phalanx.ops.triton.linear_kernels import prefetch

VARYING = ("m",)


@triton.jit
def nibbles(data, TYPE: tl.constexpr, NATIVE: tl.constexpr):
    """The low and the high four bits of bytes, as numbers of TYPE from 0 to 15, and as many ones.

    The ones come from the same place so that the compiler lays out all three alike: then products with them share the
    other factor, and its loads run ahead.

    NATIVE: four bits beside the exponent of 128 (fp16: 1024) make a float, without conversions, which are slow.
    """
    if not NATIVE:
        low = (data & 15).to(tl.float32).to(TYPE)
        high = (data >> 4).to(tl.float32).to(TYPE)
        ones = tl.full(data.shape, 1.0, tl.float32).to(TYPE)
    elif tl.bfloat16 == TYPE:
        low, high, ones = tl.inline_asm_elementwise(
            """{
            .reg .b32 a, b, c, d, one, base;
            mov.b32 one, 0x3f803f80;
            mov.b32 base, 0xc300c300;
            prmt.b32 a, $6, 0, 0x4140;
            prmt.b32 b, $6, 0, 0x4342;
            shr.u32 c, a, 4;
            shr.u32 d, b, 4;
            lop3.b32 a, a, 0x000f000f, 0x43004300, 0xea;
            lop3.b32 b, b, 0x000f000f, 0x43004300, 0xea;
            lop3.b32 c, c, 0x000f000f, 0x43004300, 0xea;
            lop3.b32 d, d, 0x000f000f, 0x43004300, 0xea;
            fma.rn.bf16x2 $0, a, one, base;
            fma.rn.bf16x2 $1, b, one, base;
            fma.rn.bf16x2 $2, c, one, base;
            fma.rn.bf16x2 $3, d, one, base;
            mov.b32 $4, one;
            mov.b32 $5, one;
            }""",
            "=r,=r,=r,=r,=r,=r,r", [data], dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=4,
        )  # fmt: skip
    else:
        low, high, ones = tl.inline_asm_elementwise(
            """{
            .reg .b32 a, b, c, d, base;
            mov.b32 base, 0xe400e400;
            prmt.b32 a, $6, 0, 0x4140;
            prmt.b32 b, $6, 0, 0x4342;
            shr.u32 c, a, 4;
            shr.u32 d, b, 4;
            lop3.b32 a, a, 0x000f000f, 0x64006400, 0xea;
            lop3.b32 b, b, 0x000f000f, 0x64006400, 0xea;
            lop3.b32 c, c, 0x000f000f, 0x64006400, 0xea;
            lop3.b32 d, d, 0x000f000f, 0x64006400, 0xea;
            add.rn.f16x2 $0, a, base;
            add.rn.f16x2 $1, b, base;
            add.rn.f16x2 $2, c, base;
            add.rn.f16x2 $3, d, base;
            mov.b32 $4, 0x3c003c00;
            mov.b32 $5, 0x3c003c00;
            }""",
            "=r,=r,=r,=r,=r,=r,r", [data], dtype=(tl.float16, tl.float16, tl.float16), is_pure=True, pack=4,
        )  # fmt: skip
    return low, high, ones


@triton.jit(do_not_specialize=VARYING)
def byte_rows_kernel(
    x, w, scale, bias, y, m, n, k, x_stride, w_stride,
    BIASED: tl.constexpr, EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    PDL: tl.constexpr, PREFETCH: tl.constexpr,
):  # fmt: skip
    """int8 or e4m3 numbers with a scale for each output: x [m, k], w [n, k] -> y [m, n], dense."""
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = columns < n
    weights = w + tl.minimum(columns, n - 1).to(tl.int64) * w_stride
    factor = tl.load(scale + columns, mask=inside, other=0.0)
    if PDL:
        gdc_launch_dependents()
        if PREFETCH > 0:
            prefetch(weights, k, BLOCK_N, PREFETCH, 128)
        gdc_wait()
    rows = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    real = rows < m
    inner = tl.arange(0, BLOCK_K)
    x_at = x + rows.to(tl.int64)[:, None] * x_stride + inner[None, :]
    w_at = weights[None, :] + inner[:, None]
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in tl.range(0, k, BLOCK_K):
        if EVEN_K:
            a = tl.load(x_at + start, mask=real[:, None], other=0.0)
            b = tl.load(w_at + start, eviction_policy="evict_first")
        else:
            valid = start + inner < k
            a = tl.load(x_at + start, mask=real[:, None] & valid[None, :], other=0.0)
            b = tl.load(w_at + start, mask=valid[:, None], other=0.0)
        if PDL:
            acc = tl.dot(a, b.to(a.dtype), acc)
        else:
            # The interpreter makes no bf16 numbers of those of a byte.
            acc = tl.dot(a, b.to(tl.float32).to(a.dtype), acc)
    acc *= factor[None, :]
    if BIASED:
        acc += tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)[None, :]
    y_at = y + rows.to(tl.int64)[:, None] * n + columns[None, :]
    tl.store(y_at, acc.to(y.dtype.element_ty), mask=real[:, None] & inside[None, :])


@triton.jit(do_not_specialize=VARYING)
def int4_rows_kernel(
    x, w, scale, offset, bias, y, m, n, k, x_stride, w_stride,
    BIASED: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    PDL: tl.constexpr, PREFETCH: tl.constexpr,
):  # fmt: skip
    """Weights of four bits with a scale and an offset for each group: x [m, k], w [n, k / 2] -> y [m, n], dense.

    A step takes one group of the first half of K and one of the second, which share their bytes.
    """
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = columns < n
    row_of = tl.minimum(columns, n - 1).to(tl.int64)
    weights = w + row_of * w_stride
    half = k // 2
    groups = k // GROUP
    scales, offsets = scale + row_of, offset + row_of
    if PDL:
        gdc_launch_dependents()
        if PREFETCH > 0:
            prefetch(weights, half, BLOCK_N, PREFETCH, 128)
        gdc_wait()
    rows = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    real = rows < m
    inner = tl.arange(0, GROUP)
    x_at = x + rows.to(tl.int64)[:, None] * x_stride + inner[None, :]
    w_at = weights[None, :] + inner[:, None]
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    steps = groups // 2
    low_scale, high_scale = tl.load(scales).to(tl.float32), tl.load(scales + steps * n).to(tl.float32)
    low_offset, high_offset = tl.load(offsets).to(tl.float32), tl.load(offsets + steps * n).to(tl.float32)
    for step in tl.range(0, steps):
        low_x = tl.load(x_at + step * GROUP, mask=real[:, None], other=0.0)
        high_x = tl.load(x_at + half + step * GROUP, mask=real[:, None], other=0.0)
        data = tl.load(w_at + step * GROUP, eviction_policy="evict_first")
        # Scales of the next step, so that none is waited for.
        ahead = tl.minimum(step + 1, steps - 1) * n
        next_low_scale, next_low_offset = tl.load(scales + ahead), tl.load(offsets + ahead)
        next_high_scale, next_high_offset = tl.load(scales + steps * n + ahead), tl.load(offsets + steps * n + ahead)
        low, high, ones = nibbles(data, x.dtype.element_ty, PDL)
        # Sums of x for each group, as a product with ones: they come out where they are needed.
        acc += tl.dot(low_x, low) * low_scale[None, :] + tl.dot(low_x, ones) * low_offset[None, :]
        acc += tl.dot(high_x, high) * high_scale[None, :] + tl.dot(high_x, ones) * high_offset[None, :]
        low_scale, low_offset = next_low_scale.to(tl.float32), next_low_offset.to(tl.float32)
        high_scale, high_offset = next_high_scale.to(tl.float32), next_high_offset.to(tl.float32)
    if BIASED:
        acc += tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)[None, :]
    y_at = y + rows.to(tl.int64)[:, None] * n + columns[None, :]
    tl.store(y_at, acc.to(y.dtype.element_ty), mask=real[:, None] & inside[None, :])


@triton.jit
def restore_byte_kernel(w, scale, out, n, k, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """What int8 or e4m3 numbers stand for: w [n, k] -> out [n, k]; grid (cdiv(k, BLOCK_K), cdiv(n, BLOCK_N))."""
    rows = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    columns = tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K)
    inside = (rows < n)[:, None] & (columns < k)[None, :]
    place = rows.to(tl.int64)[:, None] * k + columns[None, :]
    factor = tl.load(scale + rows, mask=rows < n, other=0.0)
    value = tl.load(w + place, mask=inside, other=0.0).to(tl.float32) * factor[:, None]
    tl.store(out + place, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def restore_int4_kernel(w, scale, offset, out, n, k, GROUP: tl.constexpr, BLOCK_N: tl.constexpr, NATIVE: tl.constexpr):
    """What four-bit weights stand for: w [n, k / 2] -> out [n, k]; grid (k / GROUP / 2, cdiv(n, BLOCK_N))."""
    step = tl.program_id(0)
    rows = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = rows < n
    rows = rows.to(tl.int64)
    inner = step * GROUP + tl.arange(0, GROUP)
    half, groups = k // 2, k // GROUP
    data = tl.load(w + rows[:, None] * half + inner[None, :], mask=inside[:, None], other=0)
    low, high, _ = nibbles(data, out.dtype.element_ty, NATIVE)
    for part in tl.static_range(2):
        at = (step + part * (groups // 2)) * n + rows
        factor = tl.load(scale + at, mask=inside, other=0.0).to(tl.float32)
        shift = tl.load(offset + at, mask=inside, other=0.0).to(tl.float32)
        value = low if part == 0 else high
        value = value.to(tl.float32) * factor[:, None] + shift[:, None]
        tl.store(
            out + rows[:, None] * k + part * half + inner[None, :], value.to(out.dtype.element_ty), mask=inside[:, None]
        )
