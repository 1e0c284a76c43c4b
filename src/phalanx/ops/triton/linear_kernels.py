"""Triton kernels of `y = x W^T + b` for one row x and for a few, where reading W is all the work.

W is `[out, in]` as a checkpoint has it. Every program makes a few columns of y and walks the whole of K, so that no
sums are put together afterwards.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from phalanx.ops.triton.activation_kernels import activate

# What varies from step to step must not make another variant of a kernel.
VARYING = ("m",)


@triton.jit
def prefetch(rows, k, BLOCK_N: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr):
    """Brings the first COLUMNS elements of each row (pointers [BLOCK_N]) into L2, a line every STEP elements."""
    steps = tl.arange(0, COLUMNS // STEP) * STEP
    # A prefetch beyond the end of a row is of no use, but must not leave the weight.
    at = rows[:, None] + tl.minimum(steps, k - 1)[None, :]
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [at], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def one_row_kernel(
    x, w, scale, bias, y, n, k, w_stride,
    SCALED: tl.constexpr, BIASED: tl.constexpr, EVEN_K: tl.constexpr, STEPS: tl.constexpr, GATE: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """x [k] -> y [n] by fp32 multiply-adds; grid (cdiv(n, BLOCK_N),).

    SCALED: w holds 8-bit numbers, scale [n] what they are multiplied by. STEPS: cdiv(k, BLOCK_K) where that is small,
    and the loop is written out; else 0. GATE: an activation, or "none"; with one, outputs are gate | up, and y [n / 2]
    is the gated activation of them.
    """
    columns, inside = columns_of(n, BLOCK_N, GATE)
    rows = w + tl.minimum(columns, n - 1).to(tl.int64) * w_stride
    inner = tl.arange(0, BLOCK_K)
    # The first weights do not depend on what runs before, so they are read before the kernel ahead has ended.
    part = row_part(rows, inner, k, EVEN_K)
    if SCALED:
        factor = tl.load(scale + columns, mask=inside, other=0.0)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    acc = part.to(tl.float32) * x_part(x, inner, k, EVEN_K).to(tl.float32)[None, :]
    if STEPS > 0:
        for step in tl.static_range(1, STEPS):
            at = step * BLOCK_K + inner
            acc += row_part(rows, at, k, EVEN_K).to(tl.float32) * x_part(x, at, k, EVEN_K).to(tl.float32)[None, :]
    else:
        for start in tl.range(BLOCK_K, k, BLOCK_K):
            at = start + inner
            acc += row_part(rows, at, k, EVEN_K).to(tl.float32) * x_part(x, at, k, EVEN_K).to(tl.float32)[None, :]
    total = tl.sum(acc, 1)
    if SCALED:
        total *= factor
    if BIASED:
        total += tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
    if GATE == "none":
        tl.store(y + columns, total.to(y.dtype.element_ty), mask=inside)
    else:
        store_gated(y, total, n, GATE, BLOCK_N)


@triton.jit(do_not_specialize=VARYING)
def few_rows_kernel(
    x, x_scale, w, scale, bias, y, maxima, m, n, k, x_stride, w_stride,
    SCALED: tl.constexpr, BIASED: tl.constexpr, EVEN_K: tl.constexpr, SWAPPED: tl.constexpr, GATE: tl.constexpr,
    MAXIMA: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    PDL: tl.constexpr, PREFETCH: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """x [m, k], w [n, k] of one dtype -> y [m, n], dense; grid (cdiv(n, BLOCK_N), cdiv(m, BLOCK_M)).

    SCALED: they are e4m3 numbers, x_scale float32 [m] and scale float32 [n] what they are multiplied by. SWAPPED: y's
    columns are the tall side of the product: the matrix units take 64 of them and few rows. PREFETCH: the elements of
    each of w's rows that are brought in before the kernel ahead has ended; STEP: how many a line of the cache holds.
    GATE: as in ``one_row_kernel``; y is [m, n / 2]. MAXIMA: with a gate, the largest magnitude that a program made of a
    row goes to maxima float32 [m, programs].
    """
    columns, inside = columns_of(n, BLOCK_N, GATE)
    weights = w + tl.minimum(columns, n - 1).to(tl.int64) * w_stride
    if PDL:
        gdc_launch_dependents()
        if PREFETCH > 0:
            prefetch(weights, k, BLOCK_N, PREFETCH, STEP)
        gdc_wait()
    rows = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    real = rows < m
    row_at = x + tl.minimum(rows, m - 1).to(tl.int64) * x_stride
    inner = tl.arange(0, BLOCK_K)
    if SWAPPED:
        acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        w_at, x_at = weights[:, None] + inner[None, :], row_at[None, :] + inner[:, None]
    else:
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        w_at, x_at = weights[None, :] + inner[:, None], row_at[:, None] + inner[None, :]
    for start in tl.range(0, k, BLOCK_K):
        there = start + inner < k
        if EVEN_K:
            a = tl.load(x_at + start)
            b = tl.load(w_at + start)
        elif SWAPPED:
            a = tl.load(x_at + start, mask=there[:, None], other=0.0)
            b = tl.load(w_at + start, mask=there[None, :], other=0.0)
        else:
            a = tl.load(x_at + start, mask=there[None, :], other=0.0)
            b = tl.load(w_at + start, mask=there[:, None], other=0.0)
        # The matrix units sum e4m3 products in few bits: each step's sum goes to fp32.
        if SWAPPED:
            acc = tl.dot(b, a, acc, max_num_imprecise_acc=BLOCK_K)
        else:
            acc = tl.dot(a, b, acc, max_num_imprecise_acc=BLOCK_K)
    if SCALED:
        x_factor = tl.load(x_scale + rows, mask=real, other=0.0)
        factor = tl.load(scale + columns, mask=inside, other=0.0)
        if SWAPPED:
            acc *= x_factor[None, :] * factor[:, None]
        else:
            acc *= x_factor[:, None] * factor[None, :]
    if BIASED:
        shift = tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
        if SWAPPED:
            acc += shift[:, None]
        else:
            acc += shift[None, :]
    if GATE != "none":
        wide = tl.trans(acc) if SWAPPED else acc
        gate, up = tl.split(tl.reshape(wide, (BLOCK_M, BLOCK_N // 2, 2)))
        column = tl.program_id(0) * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
        kept = real[:, None] & (column < n // 2)[None, :]
        result = (activate(gate, GATE) * up).to(y.dtype.element_ty)
        tl.store(y + rows.to(tl.int64)[:, None] * (n // 2) + column[None, :], result, mask=kept)
        if MAXIMA:
            largest = tl.max(tl.abs(tl.where(kept, result.to(tl.float32), 0.0)), 1)
            tl.store(maxima + rows.to(tl.int64) * tl.num_programs(0) + tl.program_id(0), largest, mask=real)
    elif SWAPPED:
        y_at, kept = y + rows.to(tl.int64)[None, :] * n + columns[:, None], inside[:, None] & real[None, :]
        tl.store(y_at, acc.to(y.dtype.element_ty), mask=kept)
    else:
        y_at, kept = y + rows.to(tl.int64)[:, None] * n + columns[None, :], real[:, None] & inside[None, :]
        tl.store(y_at, acc.to(y.dtype.element_ty), mask=kept)


@triton.jit
def columns_of(n, BLOCK_N: tl.constexpr, GATE: tl.constexpr):
    """The columns [BLOCK_N] of a product with n outputs that this program makes, and which of them there are. With a
    GATE, outputs are gate | up, and each gate stands before its up."""
    lane = tl.arange(0, BLOCK_N)
    column = tl.program_id(0) * BLOCK_N + lane
    inside = column < n
    if GATE != "none":
        column = tl.program_id(0) * (BLOCK_N // 2) + lane // 2
        inside = column < n // 2
        column += lane % 2 * (n // 2)
    return column, inside


@triton.jit
def store_gated(y, total, n, GATE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Writes the gated activation of float32 `total` [BLOCK_N], ordered as by `columns_of`, to its place in y [n / 2].
    Returns what was written, as float32 [BLOCK_N / 2], 0 beyond the end."""
    gate, up = tl.split(tl.reshape(total, (BLOCK_N // 2, 2)))
    column = tl.program_id(0) * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
    inside = column < n // 2
    result = (activate(gate, GATE) * up).to(y.dtype.element_ty)
    tl.store(y + column, result, mask=inside)
    return tl.where(inside, result.to(tl.float32), 0.0)


@triton.jit
def row_part(rows, at, k, EVEN_K: tl.constexpr):
    """The elements `at` [K] of each of `rows` [N] -> [N, K]."""
    if EVEN_K:
        return tl.load(rows[:, None] + at[None, :], eviction_policy="evict_first")
    return tl.load(rows[:, None] + at[None, :], mask=(at < k)[None, :], other=0.0)


@triton.jit
def x_part(x, at, k, EVEN_K: tl.constexpr):
    """The elements `at` [K] of the row x."""
    if EVEN_K:
        return tl.load(x + at)
    return tl.load(x + at, mask=at < k, other=0.0)
