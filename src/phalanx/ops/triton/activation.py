"""Activations, alone and as the gate of a gated MLP; names without a kernel run as the references do."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from phalanx.ops import registry
from phalanx.ops.activation import reference_activation, reference_gated_activation
from phalanx.ops.quantized import FP8_ROWS
from phalanx.ops.triton.activation_kernels import KINDS, activation_kernel
from phalanx.ops.triton.fp8_kernels import gated_fp8_kernel
from phalanx.ops.triton.fp8_linear import WIDEST, quantize_by_maxima
from phalanx.ops.triton.fp8_rows import Fp8Rows, leave, takes_fp8
from phalanx.ops.triton.support import early_launch, multiprocessors, on_gpu

_BLOCK = 1024


def _run(x: Tensor, kind: str, width: int, gated: bool, maxima: Tensor | None = None) -> Tensor:
    flat = x.reshape(-1, x.shape[-1])
    flat = flat if flat.stride(1) == 1 else flat.contiguous()
    out = torch.empty((*x.shape[:-1], width), dtype=x.dtype, device=x.device)
    activation_kernel[(flat.shape[0], -(-width // _BLOCK))](
        flat, out, out if maxima is None else maxima, flat.stride(0), width,
        KIND=kind, GATED=gated, MAXIMA=maxima is not None, BLOCK=_BLOCK, num_warps=4, **early_launch(x.device),
    )  # fmt: skip
    return out


def gated_activation(x: Tensor, name: str) -> Tensor:
    """See `phalanx.ops.activation.gated_activation`."""
    kind = KINDS.get(name)
    if kind is None or x.shape[-1] % 2 or x.numel() == 0:
        return reference_gated_activation(x, name)
    return _run(x, kind, x.shape[-1] // 2, gated=True)


def gated_activation_fp8(x: Tensor, name: str) -> Tensor:
    """`gated_activation` that leaves its rows quantised, too, where x is [rows, 2 N]."""
    kind, width = KINDS.get(name), x.shape[-1] // 2
    if kind is None or x.dim() != 2 or x.shape[-1] % 2 or x.numel() == 0 or width > WIDEST or x.stride(1) != 1:
        return gated_activation(x, name)
    rows = x.shape[0]
    if rows <= multiprocessors(x.device):
        # A program a row would leave most of the device idle.
        maxima = torch.empty((rows, -(-width // _BLOCK)), dtype=torch.float32, device=x.device)
        out = _run(x, kind, width, True, maxima)
        return leave(out, Fp8Rows(*quantize_by_maxima(out, maxima)))
    out = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    numbers = torch.empty((rows, width), dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(rows, dtype=torch.float32, device=x.device)
    block = max(16, triton.next_power_of_2(width))
    gated_fp8_kernel[(rows,)](
        x, out, numbers, scales, x.stride(0), width, KIND=kind, BLOCK=block, num_warps=16 if block > 2048 else 4,
        **early_launch(x.device),
    )  # fmt: skip
    return leave(out, Fp8Rows(numbers, scales))


def activation(x: Tensor, name: str) -> Tensor:
    """See `phalanx.ops.activation.activation`."""
    kind = KINDS.get(name)
    if kind is None or x.numel() == 0:
        return reference_activation(x, name)
    return _run(x, kind, x.shape[-1], gated=False)


registry.register("gated_activation", "triton", gated_activation, supports=on_gpu, priority=10)
registry.register("gated_activation", FP8_ROWS, gated_activation_fp8, supports=takes_fp8, priority=-10)
registry.register("activation", "triton", activation, supports=on_gpu, priority=10)
