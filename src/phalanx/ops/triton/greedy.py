"""The likeliest token of each row, written to the token table: every row by many programs, then one."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from phalanx.ops import registry
from phalanx.ops.triton.support import on_gpu

_PART, _SMALL_PART = 4096, 1024
"""Logits of one program: small where few rows have to fill the device."""


@triton.jit
def _part_kernel(logits, values, ids, row_stride, vocab, parts, PART: tl.constexpr):
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = part * PART + tl.arange(0, PART)
    value = tl.load(logits + row * row_stride + column, mask=column < vocab, other=float("-inf")).to(tl.float32)
    # NaN counts as more than anything, so that it is found.
    value = tl.where(value == value, value, float("inf"))
    top, place = tl.max(value, 0, return_indices=True)
    tl.store(values + row * parts + part, top)
    tl.store(ids + row * parts + part, part * PART + place)


@triton.jit
def _row_kernel(values, ids, table, slots, columns, out, table_stride, last, parts, PARTS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PARTS)
    value = tl.load(values + row * parts + part, mask=part < parts, other=float("-inf"))
    top, place = tl.max(value, 0, return_indices=True)
    token = tl.load(ids + row * parts + place).to(tl.int64)
    token = tl.where((top < float("inf")) & (top > float("-inf")), token, -1)
    tl.store(out + row, token)
    slot, column = tl.load(slots + row), tl.load(columns + row)
    real = slot >= 0
    target = table + tl.where(real, slot, 0) * table_stride + tl.where(real, column, last)
    tl.store(target, tl.maximum(token, 0))


def draw_greedy(logits: Tensor, table: Tensor, slots: Tensor, columns: Tensor) -> Tensor:
    """See `phalanx.ops.sampling.draw_greedy`."""
    rows, vocab = logits.shape
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows == 0:
        return out
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    part = _SMALL_PART if rows <= 8 else _PART
    parts = -(-vocab // part)
    values = torch.empty((rows, parts), dtype=torch.float32, device=logits.device)
    ids = torch.empty((rows, parts), dtype=torch.int32, device=logits.device)
    _part_kernel[(rows, parts)](logits, values, ids, logits.stride(0), vocab, parts, PART=part, num_warps=part // 512)
    _row_kernel[(rows,)](
        values, ids, table, slots, columns, out, table.stride(0), table.shape[1] - 1, parts,
        PARTS=triton.next_power_of_2(parts), num_warps=1,
    )  # fmt: skip
    return out


registry.register("draw_greedy", "triton", draw_greedy, supports=on_gpu, priority=10)
