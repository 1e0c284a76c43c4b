"""Masks of tokens: every part of a masked row by a program of its own."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from phalanx.ops import registry
from phalanx.ops.triton.support import on_gpu

_PART = 2048
"""Logits of one program."""


@triton.jit
def _mask_kernel(logits, rows, bits, row_stride, bits_stride, vocab, PART: tl.constexpr):
    line = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * PART + tl.arange(0, PART)
    inside = token < vocab
    word = tl.load(bits + line * bits_stride + token // 32, mask=inside, other=-1)
    banned = ((word >> (token % 32)) & 1) == 0
    tl.store(logits + tl.load(rows + line) * row_stride + token, float("-inf"), mask=inside & banned)


def mask_tokens(logits: Tensor, rows: Tensor, bits: Tensor) -> Tensor:
    """See `phalanx.ops.token_mask.mask_tokens`."""
    vocab = logits.shape[1]
    if len(rows):
        grid = (len(rows), triton.cdiv(vocab, _PART))
        _mask_kernel[grid](logits, rows, bits, logits.stride(0), bits.stride(0), vocab, PART=_PART)
    return logits


registry.register("mask_tokens", "triton", mask_tokens, supports=on_gpu, priority=10)
