"""Normalisation over the last dimension: RMSNorm, residual add + RMSNorm, LayerNorm.

All compute in fp32 (float64 for float64 inputs) and round once, to x's dtype. The weight may have another dtype.
"""

from __future__ import annotations

import torch
from torch import Tensor

from phalanx.ops import registry


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x / sqrt(mean(x^2) + eps) * weight`; x `[..., N]` (may be a strided view), weight `[N]` -> `[..., N]`."""
    return registry.select("rms_norm", device=x.device, dtype=x.dtype)(x, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`new = x + residual`, rounded to x's dtype; returns `(rms_norm(new), new)`. Changes neither input."""
    return registry.select("add_rms_norm", device=x.device, dtype=x.dtype)(x, residual, weight, eps)


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """`(x - mean) / sqrt(var + eps) * weight + bias`; x `[..., N]`, weight and bias `[N]` or None -> `[..., N]`."""
    return registry.select("layer_norm", device=x.device, dtype=x.dtype)(x, weight, bias, eps)


def reference_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`rms_norm` in plain PyTorch."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (normed * weight.to(wide.dtype)).to(x.dtype)


def reference_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`add_rms_norm` in plain PyTorch."""
    new = x + residual
    return reference_rms_norm(new, weight, eps), new


def reference_layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """`layer_norm` in plain PyTorch."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    scale = None if weight is None else weight.to(wide.dtype)
    shift = None if bias is None else bias.to(wide.dtype)
    return torch.nn.functional.layer_norm(wide, wide.shape[-1:], scale, shift, eps).to(x.dtype)


registry.register("rms_norm", "reference", reference_rms_norm)
registry.register("add_rms_norm", "reference", reference_add_rms_norm)
registry.register("layer_norm", "reference", reference_layer_norm)
