"""Masks of tokens as bits: token t is bit t % 32 of number t // 32."""

from __future__ import annotations

import torch
from torch import Tensor

from phalanx.ops import registry


def mask_tokens(logits: Tensor, rows: Tensor, bits: Tensor) -> Tensor:
    """Sets the logits of tokens that a mask does not allow to -inf, in place, and returns them.

    Args:
        logits: floating point [R, V], contiguous.
        rows: int64 [G], each row of logits at most once; the others stay as they are.
        bits: int32 [G, ceil(V / 32)].
    """
    run = registry.select("mask_tokens", device=logits.device, dtype=logits.dtype)
    masked: Tensor = run(logits, rows, bits)
    return masked


def reference_mask_tokens(logits: Tensor, rows: Tensor, bits: Tensor) -> Tensor:
    """`mask_tokens` in plain PyTorch."""
    places = torch.arange(32, dtype=torch.int32, device=bits.device)
    allowed = ((bits[:, :, None] >> places) & 1).flatten(1)[:, : logits.shape[1]] != 0
    logits[rows] = logits[rows].masked_fill(~allowed, float("-inf"))
    return logits


registry.register("mask_tokens", "reference", reference_mask_tokens)
