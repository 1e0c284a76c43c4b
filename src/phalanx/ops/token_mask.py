"""Masks of tokens as bits: token t is bit t % 32 of number t // 32."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from phalanx.ops import registry


def mask_tokens(logits: Tensor, rows: Tensor, bits: Tensor) -> Tensor:
    """Sets the logits of tokens that a mask does not allow to -inf, in place, and returns them.

    Args:
        logits: finite floating point [R, V], contiguous.
        rows: int64 [G], each row of logits at most once; the others stay as they are.
        bits: int32 [G, ceil(V / 32)].
    """
    run = registry.select("mask_tokens", device=logits.device, dtype=logits.dtype)
    masked: Tensor = run(logits, rows, bits)
    return masked


def reference_mask_tokens(logits: Tensor, rows: Tensor, bits: Tensor) -> Tensor:
    """`mask_tokens` in plain PyTorch."""
    # A byte at a time by a table: many times as fast on a CPU as bit by bit.
    table = _of_bytes(logits.dtype).to(logits.device)
    addend = table.index_select(0, bits.contiguous().view(torch.uint8).flatten().int()).view(len(bits), -1)
    logits[rows] = logits[rows].add_(addend[:, : logits.shape[1]])
    return logits


@functools.cache
def _of_bytes(dtype: torch.dtype) -> Tensor:
    """What each byte of a mask adds to eight logits, [256, 8]."""
    banned = ((torch.arange(256)[:, None] >> torch.arange(8)) & 1) == 0
    return torch.where(banned, float("-inf"), 0.0).to(dtype)


registry.register("mask_tokens", "reference", reference_mask_tokens)
