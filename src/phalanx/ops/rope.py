"""Rotary position embedding of q and k, fused with the write of k and v into the blocked cache."""

from __future__ import annotations

import torch
from torch import Tensor

from phalanx.ops import registry


def rope_write_kv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    slot_mapping: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    interleaved: bool = False,
) -> Tensor:
    """Rotates q and k, writes k and v to their slots of the cache, returns the rotated q.

    Args:
        q: `[T, Hq, D]`; k, v: `[T, Hkv, D]`; may be strided views of one fused qkv. Not changed.
        cos, sin: fp32 `[T, rot/2]`, of each token's position; the first `rot <= D` dimensions of a head turn, the
            rest pass. Both None: no rotation.
        slot_mapping: int64 `[T]`, `block * block_size + offset` of each token; no slot twice, except for padding.
        k_cache, v_cache: `[blocks, block_size, Hkv, D]` of k's dtype, written in place.
        interleaved: dimension pairs (2i, 2i+1) are rotated; else (i, i + rot/2).
    Returns:
        `[T, Hq, D]`, contiguous, of q's dtype.
    """
    run = registry.select("rope_write_kv", device=q.device, dtype=q.dtype)
    return run(q, k, v, cos, sin, slot_mapping, k_cache, v_cache, interleaved=interleaved)


def reference_rope_write_kv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    slot_mapping: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    interleaved: bool = False,
) -> Tensor:
    """`rope_write_kv` in plain PyTorch; rotates in fp32 (float64 for float64 inputs) and rounds once."""
    blocks = slot_mapping // k_cache.shape[1]
    offsets = slot_mapping % k_cache.shape[1]
    k_cache[blocks, offsets] = rotate(k, cos, sin, interleaved)
    v_cache[blocks, offsets] = v
    return rotate(q, cos, sin, interleaved).contiguous()


def rotate(x: Tensor, cos: Tensor | None, sin: Tensor | None, interleaved: bool = False) -> Tensor:
    """x `[T, H, D]` rotated by cos, sin `[T, rot/2]` as in `rope_write_kv`; x itself where they are None."""
    if cos is None or sin is None:
        return x
    rot = 2 * cos.shape[-1]
    if rot > x.shape[-1]:
        raise ValueError(f"rope of {rot} dimensions on heads of {x.shape[-1]}: cos and sin must be [T, at most D/2]")
    compute = torch.promote_types(x.dtype, torch.float32)
    cos, sin = cos.to(compute)[:, None], sin.to(compute)[:, None]
    turned = x[..., :rot].to(compute)
    if interleaved:
        a, b = turned[..., 0::2], turned[..., 1::2]
        turned = torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)
    else:
        a, b = turned.chunk(2, -1)
        turned = torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
    return torch.cat((turned.to(x.dtype), x[..., rot:]), -1)


registry.register("rope_write_kv", "reference", reference_rope_write_kv)
