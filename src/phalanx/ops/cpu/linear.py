"""The native linear layer: weights in panels of 32 output features.

A weight `[out, in]` becomes `[ceil(out / 32), in', 32]` in fp32 and `[ceil(out / 32), in' / 2, 32, 2]` in bf16, where
`in'` is `in` rounded up to 32, and what is added is 0. An fp32 weight whose values are all bf16 numbers (most
checkpoints are) is held in bf16: half the memory and half the reads, the same results.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from phalanx.ops import registry
from phalanx.ops.cpu.library import kernels, supports
from phalanx.ops.linear import PreparedWeight

PANEL = 32
PAD_IN = 32


class PanelLinear:
    """The layout `panels`. Products are bit-equal for a row whatever rows stand beside it, at any thread count."""

    def prepare(self, weight: Tensor) -> PreparedWeight:
        out_features, in_features = weight.shape
        padded = -(-in_features // PAD_IN) * PAD_IN
        panels = -(-out_features // PANEL)
        if _is_bf16_valued(weight):
            data = torch.empty(panels, padded // 2, PANEL, 2, dtype=torch.bfloat16)
            source = weight.to(torch.bfloat16).contiguous()
            # Pairs of bf16 are moved as one 4-byte element each. (`pad` copies even where it adds nothing.)
            if in_features % 2:
                source = torch.nn.functional.pad(source, (0, 1))
            columns = source.shape[1] // 2
        else:
            data = torch.empty(panels, padded, PANEL, dtype=torch.float32)
            source, columns = weight.contiguous(), in_features
        threads = torch.get_num_threads()
        kernels().pack(source.data_ptr(), columns, out_features, columns, data.data_ptr(), data.shape[1], threads)
        return PreparedWeight(data, "panels", out_features, in_features, weight.dtype)

    def apply(self, x: Tensor, weight: PreparedWeight, bias: Tensor | None) -> Tensor:
        rows = x if x.dim() == 2 else x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
        count, in_features = rows.shape
        if in_features != weight.in_features or x.dtype != weight.dtype:
            raise ValueError(
                f"linear: the weight takes [..., {weight.in_features}] of {weight.dtype}; "
                f"x is {tuple(x.shape)} of {x.dtype}"
            )
        if bias is not None:
            bias = _checked_bias(bias, weight)
        out_features = weight.out_features
        out = torch.empty(count, out_features, dtype=x.dtype)
        if count and out_features and in_features:
            if rows.stride(1) != 1:
                rows = rows.contiguous()
            data, native = weight.data, kernels()
            native.linear(
                rows.data_ptr(),
                rows.stride(0),
                count,
                in_features,
                out_features,
                data.data_ptr(),
                None if bias is None else bias.data_ptr(),
                out.data_ptr(),
                x.dtype is torch.bfloat16,
                data.dtype is torch.bfloat16,
                native.amx,
                torch.get_num_threads(),
            )
        elif bias is not None:
            out.copy_(bias.expand_as(out))
        else:
            out.zero_()
        return out if x.dim() == 2 else out.view(*x.shape[:-1], out_features)

    def lookup(self, weight: PreparedWeight, ids: Tensor) -> Tensor:
        rows = weight.data[ids // PANEL, :, ids % PANEL]
        return rows.flatten(ids.dim())[..., : weight.in_features].to(weight.dtype)

    def restore(self, weight: PreparedWeight) -> Tensor:
        return self.lookup(weight, torch.arange(weight.out_features)).contiguous()


def _is_bf16_valued(weight: Tensor) -> bool:
    # Some rows at a time: a copy of a whole weight is what a machine may lack the memory for.
    return weight.dtype == torch.bfloat16 or all(
        torch.equal(part, part.to(torch.bfloat16).to(part.dtype)) for part in weight.split(PANEL)
    )


def _checked_bias(bias: Tensor, weight: PreparedWeight) -> Tensor:
    if bias.shape != (weight.out_features,):
        raise ValueError(f"linear: a bias of [{weight.out_features}] is expected, got {tuple(bias.shape)}")
    return bias.to(weight.dtype).contiguous()


registry.register("linear", "panels", PanelLinear(), supports=supports, priority=10)
