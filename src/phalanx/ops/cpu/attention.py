"""The native attention over the blocked KV cache, and the native rope with its cache write."""

from __future__ import annotations

import struct

import torch
from torch import Tensor

from phalanx.ops import registry
from phalanx.ops.cpu.library import kernels, supports

# AttentionSizes and RopeSizes of the C++ side, field by field.
_ATTENTION_SIZES = struct.Struct("@16l2fi0l")
_ROPE_SIZES = struct.Struct("@19l2i")


def attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    cu_seqlens_q: Tensor,
    seq_lens: Tensor,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    max_query_len: int,
    max_seq_len: int,
) -> Tensor:
    """See `phalanx.ops.attention.paged_attention`."""
    tokens, heads, dim = q.shape
    out = torch.empty(tokens, heads, dim, dtype=q.dtype)
    if out.numel() == 0:
        return out
    kv_heads = _check_caches(q, k_cache, v_cache)
    if heads % kv_heads:
        raise ValueError(f"attention: {heads} query heads do not divide over {kv_heads} KV heads")
    q, block_table = _dense(q), _int32(block_table)
    cu_seqlens_q, seq_lens = _int32(cu_seqlens_q), _int32(seq_lens)
    sizes = _ATTENTION_SIZES.pack(
        tokens, seq_lens.shape[0], kv_heads, heads // kv_heads, dim, k_cache.shape[1],
        *q.stride()[:2], *k_cache.stride()[:3], *v_cache.stride()[:3], block_table.stride(0),
        window or 0, scale, soft_cap or 0.0, torch.get_num_threads(),
    )  # fmt: skip
    native = kernels()
    native.attention(
        sizes,
        q.data_ptr(),
        k_cache.data_ptr(),
        v_cache.data_ptr(),
        block_table.data_ptr(),
        cu_seqlens_q.data_ptr(),
        seq_lens.data_ptr(),
        out.data_ptr(),
        q.dtype == torch.bfloat16,
        native.amx,
    )
    return out


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
    """See `phalanx.ops.rope.rope_write_kv`."""
    tokens, heads, dim = q.shape
    out = torch.empty(tokens, heads, dim, dtype=q.dtype)
    kv_heads = _check_caches(k, k_cache, v_cache)
    if k.shape != (tokens, kv_heads, dim) or v.shape != k.shape:
        raise ValueError(f"rope_write_kv: q {tuple(q.shape)} with k {tuple(k.shape)} and v {tuple(v.shape)}")
    half = 0
    if cos is not None and sin is not None:
        half = cos.shape[-1]
        if cos.shape != (tokens, half) or sin.shape != cos.shape or 2 * half > dim:
            raise ValueError(
                f"rope of heads of {dim}: cos and sin must be [{tokens}, at most {dim // 2}], got {tuple(cos.shape)}"
            )
        cos, sin = _dense(cos.to(torch.float32)), _dense(sin.to(torch.float32))
    if slot_mapping.dtype != torch.int64 or not slot_mapping.is_contiguous():
        slot_mapping = slot_mapping.to(torch.int64).contiguous()
    q, k, v = _dense(q), _dense(k), _dense(v)
    sizes = _ROPE_SIZES.pack(
        tokens, heads, kv_heads, dim, half, k_cache.shape[1],
        *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], half, *k_cache.stride()[:3], *v_cache.stride()[:3],
        interleaved, torch.get_num_threads(),
    )  # fmt: skip
    kernels().rope_write_kv(
        sizes,
        q.data_ptr(),
        k.data_ptr(),
        v.data_ptr(),
        None if cos is None else cos.data_ptr(),
        None if sin is None else sin.data_ptr(),
        slot_mapping.data_ptr(),
        k_cache.data_ptr(),
        v_cache.data_ptr(),
        out.data_ptr(),
        q.dtype == torch.bfloat16,
    )
    return out


def _check_caches(x: Tensor, k_cache: Tensor, v_cache: Tensor) -> int:
    """The number of KV heads, if the caches go with x `[T, heads, D]`."""
    if k_cache.shape != v_cache.shape or k_cache.dim() != 4 or k_cache.shape[3] != x.shape[2]:
        raise ValueError(
            f"caches of [blocks, block_size, kv_heads, {x.shape[2]}] are expected beside {tuple(x.shape)}; "
            f"got {tuple(k_cache.shape)} and {tuple(v_cache.shape)}"
        )
    if not x.dtype == k_cache.dtype == v_cache.dtype or k_cache.stride(3) != 1 or v_cache.stride(3) != 1:
        raise ValueError(f"caches must be of {x.dtype} with dense heads; got {k_cache.dtype} and {v_cache.dtype}")
    return k_cache.shape[2]


def _dense(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _int32(x: Tensor) -> Tensor:
    return x if x.dtype == torch.int32 and x.is_contiguous() else x.to(torch.int32).contiguous()


registry.register("attention", "native", attention, supports=supports, priority=10)
registry.register("rope_write_kv", "native", rope_write_kv, supports=supports, priority=10)
