"""Activations, alone and as the gate of a gated MLP; names without a kernel run as the references do."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from phalanx.ops import registry
from phalanx.ops.activation import reference_activation, reference_gated_activation
from phalanx.ops.quantized import FP8_ROWS
from phalanx.ops.triton.fp8_kernels import scale_of, to_e4m3
from phalanx.ops.triton.fp8_linear import WIDEST
from phalanx.ops.triton.fp8_rows import Fp8Rows, leave, takes_fp8
from phalanx.ops.triton.support import early_launch, on_gpu

_KINDS = {
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

_BLOCK = 1024


@triton.jit
def _apply(x, KIND: tl.constexpr):
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
def _kernel(x, out, row_stride, width, KIND: tl.constexpr, GATED: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < width
    value = _apply(tl.load(x + row * row_stride + column, mask=mask, other=0.0).to(tl.float32), KIND)
    if GATED:
        value *= tl.load(x + row * row_stride + width + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * width + column, value.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _gated_fp8_kernel(
    x, out, numbers, scales, row_stride, width, KIND: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """A gated activation, and its rows as e4m3 numbers [rows, width] and scales [rows]; grid (rows,)."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < width
    value = _apply(tl.load(x + row * row_stride + column, mask=mask, other=0.0).to(tl.float32), KIND)
    value *= tl.load(x + row * row_stride + width + column, mask=mask, other=0.0).to(tl.float32)
    result = value.to(out.dtype.element_ty)
    tl.store(out + row * width + column, result, mask=mask)
    wide = tl.where(mask, result.to(tl.float32), 0.0)
    scale = scale_of(tl.max(tl.abs(wide), 0))
    tl.store(scales + row, scale)
    tl.store(numbers + row * width + column, to_e4m3(wide, scale), mask=mask)


def _run(x: Tensor, kind: str, width: int, gated: bool) -> Tensor:
    flat = x.reshape(-1, x.shape[-1])
    flat = flat if flat.stride(1) == 1 else flat.contiguous()
    out = torch.empty((*x.shape[:-1], width), dtype=x.dtype, device=x.device)
    _kernel[(flat.shape[0], -(-width // _BLOCK))](
        flat, out, flat.stride(0), width, KIND=kind, GATED=gated, BLOCK=_BLOCK, num_warps=4, **early_launch(x.device)
    )
    return out


def gated_activation(x: Tensor, name: str) -> Tensor:
    """See `phalanx.ops.activation.gated_activation`."""
    kind = _KINDS.get(name)
    if kind is None or x.shape[-1] % 2 or x.numel() == 0:
        return reference_gated_activation(x, name)
    return _run(x, kind, x.shape[-1] // 2, gated=True)


def gated_activation_fp8(x: Tensor, name: str) -> Tensor:
    """`gated_activation` that leaves its rows quantised, too, where x is [rows, 2 N]."""
    kind, width = _KINDS.get(name), x.shape[-1] // 2
    if kind is None or x.dim() != 2 or x.shape[-1] % 2 or x.numel() == 0 or width > WIDEST or x.stride(1) != 1:
        return gated_activation(x, name)
    rows = x.shape[0]
    out = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    numbers = torch.empty((rows, width), dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(rows, dtype=torch.float32, device=x.device)
    block = max(16, triton.next_power_of_2(width))
    _gated_fp8_kernel[(rows,)](
        x, out, numbers, scales, x.stride(0), width, KIND=kind, BLOCK=block, num_warps=16 if block > 2048 else 4,
        **early_launch(x.device),
    )  # fmt: skip
    return leave(out, Fp8Rows(numbers, scales))


def activation(x: Tensor, name: str) -> Tensor:
    """See `phalanx.ops.activation.activation`."""
    kind = _KINDS.get(name)
    if kind is None or x.numel() == 0:
        return reference_activation(x, name)
    return _run(x, kind, x.shape[-1], gated=False)


registry.register("gated_activation", "triton", gated_activation, supports=on_gpu, priority=10)
registry.register("gated_activation", FP8_ROWS, gated_activation_fp8, supports=takes_fp8, priority=-10)
registry.register("activation", "triton", activation, supports=on_gpu, priority=10)
