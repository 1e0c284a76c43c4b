"""The native RMSNorms and activations."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from phalanx.ops import registry
from phalanx.ops.activation import reference_activation, reference_gated_activation
from phalanx.ops.cpu.library import kernels, supports

# Activations of the form x * sigmoid(a x + b x^3); the others are left to PyTorch.
_GELU_TANH = (math.sqrt(8 / math.pi), math.sqrt(8 / math.pi) * 0.044715)
SIGMOID_LIKE = {
    "silu": (1.0, 0.0),
    "swish": (1.0, 0.0),
    "quick_gelu": (1.702, 0.0),
    "gelu_accurate": _GELU_TANH,
    "gelu_fast": _GELU_TANH,
    "gelu_new": _GELU_TANH,
    "gelu_python_tanh": _GELU_TANH,
    "gelu_pytorch_tanh": _GELU_TANH,
}


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `phalanx.ops.norm.rms_norm`."""
    return _normed(x, None, weight, eps)[0]


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See `phalanx.ops.norm.add_rms_norm`."""
    if residual.shape != x.shape or residual.dtype != x.dtype:
        raise ValueError(
            f"add_rms_norm: x {tuple(x.shape)} of {x.dtype}, residual {tuple(residual.shape)} of {residual.dtype}"
        )
    return _normed(x, residual.contiguous(), weight, eps)


def _normed(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    size = x.shape[-1]
    if weight.shape != (size,):
        raise ValueError(
            f"rms_norm: a weight of [{size}] is expected for x {tuple(x.shape)}, got {tuple(weight.shape)}"
        )
    weight = (weight if weight.dtype in (x.dtype, torch.float32) else weight.to(torch.float32)).contiguous()
    if x.dim() not in (2, 3) or x.stride(-1) != 1:
        x = x.contiguous()
    if x.dim() == 3:
        inner, outer_stride, inner_stride = x.shape[1], x.stride(0), x.stride(1)
    elif x.dim() == 2:
        inner, outer_stride, inner_stride = 1, x.stride(0), 0
    else:
        inner, outer_stride, inner_stride = 1, size, 0
    out = torch.empty(x.shape, dtype=x.dtype)
    sums = out if residual is None else torch.empty(x.shape, dtype=x.dtype)
    if out.numel():
        kernels().rms_norm(
            x.data_ptr(),
            outer_stride,
            inner_stride,
            inner,
            None if residual is None else residual.data_ptr(),
            weight.data_ptr(),
            eps,
            out.numel() // size,
            size,
            sums.data_ptr(),
            out.data_ptr(),
            x.dtype == torch.bfloat16,
            weight.dtype == torch.bfloat16,
            torch.get_num_threads(),
        )
    return out, sums


def activation(x: Tensor, name: str) -> Tensor:
    """See `phalanx.ops.activation.activation`."""
    if name not in SIGMOID_LIKE:
        return reference_activation(x, name)
    return _activated(x, name, 0)


def gated_activation(x: Tensor, name: str) -> Tensor:
    """See `phalanx.ops.activation.gated_activation`."""
    if name not in SIGMOID_LIKE or x.shape[-1] % 2:
        return reference_gated_activation(x, name)
    return _activated(x, name, 1)


def _activated(x: Tensor, name: str, gated: int) -> Tensor:
    if x.dim() != 2 or x.stride(1) != 1:
        x = x.contiguous()
    size = x.shape[-1] >> gated
    out = torch.empty(*x.shape[:-1], size, dtype=x.dtype)
    if out.numel():
        stride = x.stride(0) if x.dim() == 2 else x.shape[-1]
        a, b = SIGMOID_LIKE[name]
        kernels().activate(
            x.data_ptr(), stride, out.numel() // size, size, gated, a, b, out.data_ptr(), x.dtype == torch.bfloat16,
            torch.get_num_threads(),
        )  # fmt: skip
    return out


for _op in (rms_norm, add_rms_norm, activation, gated_activation):
    registry.register(_op.__name__, "native", _op, supports=supports, priority=10)
