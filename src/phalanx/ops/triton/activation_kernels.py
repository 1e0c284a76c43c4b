"""Triton functions of activations: alone, and as the gate of a gated MLP."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

KINDS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_accurate": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
    "quick_gelu": "quick_gelu",
}
"""Name of an activation -> what `activate` calls it; others have no kernel."""


@triton.jit
def activate(x, KIND: tl.constexpr):
    """The activation KIND of float32 x."""
    if KIND == "silu":
        return x / (1.0 + tl.exp(-x))
    if KIND == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    if KIND == "gelu_tanh":
        # 0.5 (1 + tanh u) is the sigmoid of 2 u.
        return x / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))
    if KIND == "relu":
        return tl.where(x < 0.0, 0.0, x)
    if KIND == "relu2":
        return tl.where(x < 0.0, 0.0, x * x)
    return x / (1.0 + tl.exp(-1.702 * x))


@triton.jit
def activation_kernel(
    x, out, maxima, row_stride, width,
    KIND: tl.constexpr, GATED: tl.constexpr, MAXIMA: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """x [rows, width], or [rows, 2 * width] where GATED, -> out [rows, width], dense; grid (rows, cdiv(width, BLOCK)).

    MAXIMA: the largest magnitude that each program wrote, too, as maxima float32 [rows, cdiv(width, BLOCK)].
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < width
    value = activate(tl.load(x + row * row_stride + column, mask=mask, other=0.0).to(tl.float32), KIND)
    if GATED:
        value *= tl.load(x + row * row_stride + width + column, mask=mask, other=0.0).to(tl.float32)
    result = value.to(out.dtype.element_ty)
    tl.store(out + row * width + column, result, mask=mask)
    if MAXIMA:
        largest = tl.max(tl.abs(tl.where(mask, result.to(tl.float32), 0.0)), 0)
        tl.store(maxima + row * tl.num_programs(1) + tl.program_id(1), largest)
