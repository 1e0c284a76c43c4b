"""RMSNorm, residual add + RMSNorm and LayerNorm in one pass: a row, or several narrow ones, a program."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from phalanx.ops import registry
from phalanx.ops.norm import reference_layer_norm, reference_rms_norm
from phalanx.ops.quantized import FP8_ROWS
from phalanx.ops.triton.fp8_kernels import scale_of, to_e4m3
from phalanx.ops.triton.fp8_rows import Fp8Rows, leave, takes_fp8
from phalanx.ops.triton.support import early_launch, on_gpu

# Elements that a program holds at once; wider rows go to the references.
_WIDEST = 1 << 15
_AT_ONCE = 2048


@triton.jit(do_not_specialize=["rows"])
def _norm_kernel(
    x, residual, weight, bias, out, total, numbers, scales,
    rows, inner, outer_stride, inner_stride, residual_stride, eps,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr,
    ADD: tl.constexpr, CENTRE: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr, FP8: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """FP8: the output as e4m3 numbers [rows, WIDTH] and scales [rows], too."""
    column = tl.arange(0, PADDED)
    # Parameters do not depend on what runs before: they are read before the kernel ahead has ended.
    if WEIGHT:
        factor = tl.load(weight + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    if BIAS:
        shift = tl.load(bias + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    mask = (row < rows)[:, None] & (column < WIDTH)[None, :]
    place = (row // inner * outer_stride + row % inner * inner_stride)[:, None] + column[None, :]
    value = tl.load(x + place, mask=mask, other=0.0)
    flat = row[:, None] * WIDTH + column[None, :]
    if ADD:
        other = tl.load(residual + row[:, None] * residual_stride + column[None, :], mask=mask, other=0.0)
        value = (value.to(tl.float32) + other.to(tl.float32)).to(total.dtype.element_ty)
        tl.store(total + flat, value, mask=mask)
    wide = value.to(tl.float32)
    if CENTRE:
        wide = wide - tl.sum(wide, 1)[:, None] / WIDTH
        wide = tl.where(mask, wide, 0.0)
    normed = wide * (1.0 / tl.sqrt_rn(tl.sum(wide * wide, 1) / WIDTH + eps))[:, None]
    if WEIGHT:
        normed *= factor[None, :]
    if BIAS:
        normed += shift[None, :]
    result = normed.to(out.dtype.element_ty)
    tl.store(out + flat, result, mask=mask)
    if FP8:
        wide = tl.where(mask, result.to(tl.float32), 0.0)
        scale = scale_of(tl.max(tl.abs(wide), 1))
        tl.store(scales + row, scale, mask=row < rows)
        tl.store(numbers + flat, to_e4m3(wide, scale[:, None]), mask=mask)


def _run(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    centre: bool,
    fp8: bool = False,
) -> tuple[Tensor, Tensor]:
    width = x.shape[-1]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = out if residual is None else torch.empty_like(out)
    numbers = scales = out
    if fp8:
        numbers = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
        scales = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
        leave(out, Fp8Rows(numbers, scales))
    rows = out.numel() // width if width else 0
    if rows:
        if x.stride(-1) != 1 or x.dim() > 3 or x.dim() < 1:
            x = x.reshape(rows, width).contiguous()
        if residual is not None and (residual.dim() != 2 or residual.stride(-1) != 1):
            residual = residual.reshape(rows, width).contiguous()
        # Heads of a fused projection: [tokens, heads, head_dim] with gaps between tokens.
        inner = x.shape[1] if x.dim() == 3 else 1
        outer_stride = x.stride(0) if x.dim() > 1 else 0
        inner_stride = x.stride(1) if x.dim() == 3 else 0
        padded = triton.next_power_of_2(width)
        at_once = max(1, min(16, _AT_ONCE // padded))
        _norm_kernel[(-(-rows // at_once),)](
            x, residual if residual is not None else x, weight if weight is not None else x,
            bias if bias is not None else x, out, total, numbers, scales,
            rows, inner, outer_stride, inner_stride, 0 if residual is None else residual.stride(0), eps,
            WIDTH=width, PADDED=padded, ROWS=at_once,
            ADD=residual is not None, CENTRE=centre, WEIGHT=weight is not None, BIAS=bias is not None,
            FP8=fp8, num_warps=4 if padded * at_once <= 2048 else 8 if padded <= 8192 else 16,
            **early_launch(x.device),
        )  # fmt: skip
    return out, total


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `phalanx.ops.norm.rms_norm`."""
    if x.shape[-1] > _WIDEST:
        return reference_rms_norm(x, weight, eps)
    return _run(x, None, weight, None, eps, centre=False)[0]


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See `phalanx.ops.norm.add_rms_norm`."""
    if x.shape[-1] > _WIDEST:
        total = x + residual
        return reference_rms_norm(total, weight, eps), total
    return _run(x, residual, weight, None, eps, centre=False)


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """See `phalanx.ops.norm.layer_norm`."""
    if x.shape[-1] > _WIDEST:
        return reference_layer_norm(x, weight, bias, eps)
    return _run(x, None, weight, bias, eps, centre=True)[0]


def rms_norm_fp8(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`rms_norm` that leaves its rows quantised, too, where x is [rows, N]."""
    if x.shape[-1] > _WIDEST or x.dim() != 2:
        return rms_norm(x, weight, eps)
    return _run(x, None, weight, None, eps, centre=False, fp8=True)[0]


def add_rms_norm_fp8(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`add_rms_norm` that leaves the rows of its first result quantised, too, where x is [rows, N]."""
    if x.shape[-1] > _WIDEST or x.dim() != 2:
        return add_rms_norm(x, residual, weight, eps)
    return _run(x, residual, weight, None, eps, centre=False, fp8=True)


registry.register("rms_norm", "triton", rms_norm, supports=on_gpu, priority=10)
registry.register("add_rms_norm", "triton", add_rms_norm, supports=on_gpu, priority=10)
# Only where products read e4m3 rows; see `Placement`.
registry.register("rms_norm", FP8_ROWS, rms_norm_fp8, supports=takes_fp8, priority=-10)
registry.register("add_rms_norm", FP8_ROWS, add_rms_norm_fp8, supports=takes_fp8, priority=-10)
registry.register("layer_norm", "triton", layer_norm, supports=on_gpu, priority=10)
