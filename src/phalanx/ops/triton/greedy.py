"""The likeliest token of each row, written to the token table: many programs a row find it, one takes it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from phalanx.ops import registry
from phalanx.ops.sampling import MINUS_INFINITY, PLUS_INFINITY, reference_rank_likeliest
from phalanx.ops.triton.support import on_gpu

_PART, _SMALL_PART = 4096, 1024
"""Logits of one program: small where few rows have to fill the device."""
_LEAST = tl.constexpr(-(2**63))
_PLUS, _MINUS = tl.constexpr(PLUS_INFINITY), tl.constexpr(MINUS_INFINITY)


@triton.jit(do_not_specialize=["first"])
def _part_kernel(logits, keys, row_stride, vocab, parts, first, PART: tl.constexpr):
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = part * PART + tl.arange(0, PART)
    value = tl.load(logits + row * row_stride + column, mask=column < vocab, other=float("-inf")).to(tl.float32)
    # NaN counts as more than anything, so that it is found; adding 0 makes -0 the 0 that it is equal to.
    value = tl.where(value == value, value + 0.0, float("inf"))
    top, place = tl.max(value, 0, return_indices=True)
    bits = top.to(tl.int32, bitcast=True)
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)
    token = (part * PART + place + first).to(tl.int64)
    tl.store(keys + row * parts + part, (ordered << 32) | (4294967295 - token))


@triton.jit
def _take_kernel(keys, table, slots, columns, out, table_stride, last, parts, PARTS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PARTS)
    key = tl.max(tl.load(keys + row * parts + part, mask=part < parts, other=_LEAST), 0)
    ordered, token = key >> 32, 4294967295 - (key & 4294967295)
    token = tl.where((ordered < _PLUS) & (ordered > _MINUS), token, -1)
    tl.store(out + row, token)
    slot, column = tl.load(slots + row), tl.load(columns + row)
    real = slot >= 0
    target = table + tl.where(real, slot, 0) * table_stride + tl.where(real, column, last)
    tl.store(target, tl.maximum(token, 0))


def rank_likeliest(logits: Tensor, first: int) -> Tensor:
    """See `phalanx.ops.sampling.reference_rank_likeliest`; P parts of the vocabulary have a key each."""
    rows, vocab = logits.shape
    if 0 in logits.shape:
        return reference_rank_likeliest(logits, first)
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    part = _SMALL_PART if rows <= 8 else _PART
    parts = -(-vocab // part)
    keys = torch.empty((rows, parts), dtype=torch.int64, device=logits.device)
    _part_kernel[(rows, parts)](logits, keys, logits.stride(0), vocab, parts, first, PART=part, num_warps=part // 512)
    return keys


def take_likeliest(keys: Tensor, table: Tensor, slots: Tensor, columns: Tensor) -> Tensor:
    """See `phalanx.ops.sampling.reference_take_likeliest`."""
    rows, parts = keys.shape
    out = torch.empty(rows, dtype=torch.int64, device=keys.device)
    if rows:
        _take_kernel[(rows,)](
            keys, table, slots, columns, out, table.stride(0), table.shape[1] - 1, parts,
            PARTS=triton.next_power_of_2(parts), num_warps=1,
        )  # fmt: skip
    return out


registry.register("rank_likeliest", "triton", rank_likeliest, supports=on_gpu, priority=10)
registry.register("take_likeliest", "triton", take_likeliest, supports=on_gpu, priority=10)
