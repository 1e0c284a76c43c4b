"""Rotary position embedding of q and k, fused with the write of k and v into the blocked cache."""

from __future__ import annotations

import torch
from torch import Tensor

from phalanx.ops import registry
from phalanx.ops.norm import reference_rms_norm


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
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    norm_eps: float = 0.0,
) -> Tensor:
    """Rotates q and k, writes k and v to their slots of the cache, returns the rotated q.

    Args:
        q: `[T, Hq, D]`; k, v: `[T, Hkv, D]`; may be strided views of one fused qkv. Not changed.
        cos, sin: fp32 `[T, rot/2]`, of each token's position; the first `rot <= D` dimensions of a head turn, the
            rest pass. Both None: no rotation.
        slot_mapping: int64 `[T]`, `block * block_size + offset` of each token; no slot twice, except for padding.
        k_cache, v_cache: `[blocks, block_size, Hkv, D]` of k's dtype, written in place; or (the feature "fp8_kv") of
            float8_e4m3fn, values beyond its range at its ends.
        interleaved: dimension pairs (2i, 2i+1) are rotated; else (i, i + rot/2).
        q_norm, k_norm: both or none: `[D]`, weights of an RMSNorm of each head before the rotation (the feature
            "qk_norm"), with `norm_eps`.
    Returns:
        `[T, Hq, D]`, contiguous, of q's dtype.
    """
    needs = ({"qk_norm"} if q_norm is not None else set()) | ({"fp8_kv"} if k_cache.dtype != k.dtype else set())
    run = registry.select("rope_write_kv", device=q.device, dtype=q.dtype, needs=frozenset(needs))
    norms = {} if q_norm is None else {"q_norm": q_norm, "k_norm": k_norm, "norm_eps": norm_eps}
    return run(q, k, v, cos, sin, slot_mapping, k_cache, v_cache, interleaved=interleaved, **norms)


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
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    norm_eps: float = 0.0,
) -> Tensor:
    """`rope_write_kv` in plain PyTorch; rotates in fp32 (float64 for float64 inputs) and rounds once."""
    if q_norm is not None and k_norm is not None:
        q, k = reference_rms_norm(q, q_norm, norm_eps), reference_rms_norm(k, k_norm, norm_eps)
    blocks = slot_mapping // k_cache.shape[1]
    offsets = slot_mapping % k_cache.shape[1]
    k_cache[blocks, offsets] = cached(rotate(k, cos, sin, interleaved), k_cache.dtype)
    v_cache[blocks, offsets] = cached(v, v_cache.dtype)
    return rotate(q, cos, sin, interleaved).contiguous()


def cached(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x in the dtype of a cache, at the ends of its range where it is beyond."""
    if x.dtype == dtype:
        return x
    most = torch.finfo(dtype).max
    return x.clamp(-most, most).to(dtype)


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


registry.register("rope_write_kv", "reference", reference_rope_write_kv, features=("qk_norm", "fp8_kv"))
