"""Triton kernels of `y = x W^T + b` for few rows of x, where reading W is all the work.

W is `[out, in]` as a checkpoint has it. Every program makes a few columns of y for all rows of x and walks the whole of
K, so that no sums are put together afterwards. Before a program waits for the kernel ahead of it, it has its first
weights brought into L2: they do not depend on what runs before.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

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
def finish(total, gate, bias, columns, inside, GATED: tl.constexpr, BIASED: tl.constexpr, TYPE: tl.constexpr):
    """The epilogue: bias, or silu(gate) * total, where both are rounded first as two separate ops do."""
    if BIASED:
        total += tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
    if GATED:
        gate = gate.to(TYPE).to(tl.float32)
        total = total.to(TYPE).to(tl.float32) * (gate / (1.0 + tl.exp(-gate)))
    return total.to(TYPE)


@triton.jit(do_not_specialize=VARYING)
def one_row_kernel(
    x, w, bias, y, n, k, w_stride,
    GATED: tl.constexpr, BIASED: tl.constexpr, EVEN_K: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
    PDL: tl.constexpr, PREFETCH: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """x [k] -> y [n] by fp32 multiply-adds; grid (cdiv(n, BLOCK_N),). GATED: w is [2 n, k], gate above up."""
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = columns < n
    rows = w + tl.minimum(columns, n - 1).to(tl.int64) * w_stride
    gates = rows
    if GATED:
        rows += n.to(tl.int64) * w_stride
    if PDL:
        gdc_launch_dependents()
        if PREFETCH > 0:
            prefetch(rows, k, BLOCK_N, PREFETCH, STEP)
            if GATED:
                prefetch(gates, k, BLOCK_N, PREFETCH, STEP)
        gdc_wait()
    inner = tl.arange(0, BLOCK_K)
    acc = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    gate_acc = acc
    for start in tl.range(0, k, BLOCK_K, num_stages=STAGES):
        at = start + inner
        if EVEN_K:
            part = tl.load(rows[:, None] + at[None, :], eviction_policy="evict_first")
            row = tl.load(x + at).to(tl.float32)[None, :]
            if GATED:
                gate_part = tl.load(gates[:, None] + at[None, :], eviction_policy="evict_first")
        else:
            part = tl.load(rows[:, None] + at[None, :], mask=(at < k)[None, :], other=0.0)
            row = tl.load(x + at, mask=at < k, other=0.0).to(tl.float32)[None, :]
            if GATED:
                gate_part = tl.load(gates[:, None] + at[None, :], mask=(at < k)[None, :], other=0.0)
        acc += part.to(tl.float32) * row
        if GATED:
            gate_acc += gate_part.to(tl.float32) * row
    gate = tl.sum(acc, 1)
    total = gate
    if GATED:
        gate = tl.sum(gate_acc, 1)
    total = finish(total, gate, bias, columns, inside, GATED, BIASED, y.dtype.element_ty)
    tl.store(y + columns, total, mask=inside)


@triton.jit(do_not_specialize=VARYING)
def few_rows_kernel(
    x, w, bias, y, m, n, k, x_stride, w_stride,
    GATED: tl.constexpr, BIASED: tl.constexpr, EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    PDL: tl.constexpr, PREFETCH: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """x [m, k] -> y [m, n] by tensor cores; grid (cdiv(n, BLOCK_N), cdiv(m, BLOCK_M)), y dense.

    GATED: w is [2 n, k], gate above up.
    """
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = columns < n
    weights = w + tl.minimum(columns, n - 1).to(tl.int64) * w_stride
    gates = weights
    if GATED:
        weights += n.to(tl.int64) * w_stride
    if PDL:
        gdc_launch_dependents()
        if PREFETCH > 0:
            prefetch(weights, k, BLOCK_N, PREFETCH, STEP)
            if GATED:
                prefetch(gates, k, BLOCK_N, PREFETCH, STEP)
        gdc_wait()
    rows = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    real = rows < m
    inner = tl.arange(0, BLOCK_K)
    x_at = x + rows.to(tl.int64)[:, None] * x_stride + inner[None, :]
    w_at = weights[None, :] + inner[:, None]
    g_at = gates[None, :] + inner[:, None]
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    gate_acc = acc
    for start in tl.range(0, k, BLOCK_K):
        if EVEN_K:
            a = tl.load(x_at + start, mask=real[:, None], other=0.0)
            b = tl.load(w_at + start, eviction_policy="evict_first")
        else:
            valid = start + inner < k
            a = tl.load(x_at + start, mask=real[:, None] & valid[None, :], other=0.0)
            b = tl.load(w_at + start, mask=valid[:, None], other=0.0)
        acc = tl.dot(a, b, acc, input_precision="ieee")
        if GATED:
            if EVEN_K:
                g = tl.load(g_at + start, eviction_policy="evict_first")
            else:
                g = tl.load(g_at + start, mask=valid[:, None], other=0.0)
            gate_acc = tl.dot(a, g, gate_acc, input_precision="ieee")
    total = finish(acc, gate_acc, bias, columns[None, :], inside[None, :], GATED, BIASED, y.dtype.element_ty)
    y_at = y + rows.to(tl.int64)[:, None] * n + columns[None, :]
    tl.store(y_at, total, mask=real[:, None] & inside[None, :])
