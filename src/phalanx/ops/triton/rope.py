"""Rope of q and k, per-head norms before it, and the write of k and v to the blocked cache, in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from phalanx.ops import registry
from phalanx.ops.triton.support import early_launch, on_gpu

_HEADS_AT_ONCE = 8


@triton.jit
def _rope_kernel(
    q, k, v, cos, sin, slots, k_cache, v_cache, out, q_norm, k_norm,
    eps, q_token, q_head, k_token, k_head, v_token, v_head, k_block, k_slot, k_side, v_block, v_slot, v_side,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, PADDED_HALF: tl.constexpr,
    PADDED_REST: tl.constexpr, BLOCK_SIZE: tl.constexpr, INTERLEAVED: tl.constexpr, NORMED: tl.constexpr,
    FP8: tl.constexpr, AT_ONCE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Some of the heads of q, k and v, in this order, of one token."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * AT_ONCE + tl.arange(0, AT_ONCE))[:, None]
    is_q = head < HEADS
    is_k = (head >= HEADS) & (head < HEADS + KV_HEADS)
    is_v = (head >= HEADS + KV_HEADS) & (head < HEADS + 2 * KV_HEADS)
    k_index, v_index = head - HEADS, head - HEADS - KV_HEADS
    slot = tl.load(slots + token)
    block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    q_at, k_at = q + token * q_token + head * q_head, k + token * k_token + k_index * k_head
    v_at = v + token * v_token + v_index * v_head
    out_at = out + (token * HEADS + head) * D
    k_to = k_cache + block * k_block + offset * k_slot + k_index * k_side
    v_to = v_cache + block * v_block + offset * v_slot + v_index * v_side

    # A head is its rotated pairs, and what passes behind them.
    pair = tl.arange(0, PADDED_HALF)[None, :]
    live = pair < HALF
    first = pair * 2 if INTERLEAVED else pair
    second = first + 1 if INTERLEAVED else first + HALF
    rest = 2 * HALF + tl.arange(0, PADDED_REST)[None, :]
    passing = rest < D
    a = _read(q_at, k_at, v_at, first, live, is_q, is_k, is_v)
    b = _read(q_at, k_at, v_at, second, live, is_q, is_k, is_v)
    c = _read(q_at, k_at, v_at, rest, passing, is_q, is_k, is_v)
    turned = is_q | is_k
    if NORMED:
        squares = tl.sum(a * a, 1) + tl.sum(b * b, 1) + tl.sum(c * c, 1)
        factor = (1.0 / tl.sqrt_rn(squares / D + eps))[:, None]
        a = tl.where(turned, _weighed(a * factor, q_norm, k_norm, first, live, is_q, q.dtype.element_ty), a)
        b = tl.where(turned, _weighed(b * factor, q_norm, k_norm, second, live, is_q, q.dtype.element_ty), b)
        c = tl.where(turned, _weighed(c * factor, q_norm, k_norm, rest, passing, is_q, q.dtype.element_ty), c)
    if HALF > 0:
        turn = tl.load(cos + token * HALF + pair, mask=live, other=1.0)
        lift = tl.load(sin + token * HALF + pair, mask=live, other=0.0)
        turned_a, turned_b = a * turn - b * lift, b * turn + a * lift
        a, b = tl.where(turned, turned_a, a), tl.where(turned, turned_b, b)
    _write(out_at, k_to, v_to, a, first, live, is_q, is_k, is_v, FP8)
    _write(out_at, k_to, v_to, b, second, live, is_q, is_k, is_v, FP8)
    _write(out_at, k_to, v_to, c, rest, passing, is_q, is_k, is_v, FP8)


@triton.jit
def _read(q, k, v, column, mask, is_q, is_k, is_v):
    value = tl.load(q + column, mask=mask & is_q, other=0.0).to(tl.float32)
    value += tl.load(k + column, mask=mask & is_k, other=0.0).to(tl.float32)
    return value + tl.load(v + column, mask=mask & is_v, other=0.0).to(tl.float32)


@triton.jit
def _weighed(x, q_norm, k_norm, column, mask, is_q, TYPE: tl.constexpr):
    """x times the weights of queries or keys, rounded as the output of a norm is."""
    weight = tl.load(q_norm + column, mask=mask, other=0.0).to(tl.float32)
    other = tl.load(k_norm + column, mask=mask, other=0.0).to(tl.float32)
    return (x * tl.where(is_q, weight, other)).to(TYPE).to(tl.float32)


@triton.jit
def _write(out, k_to, v_to, value, column, mask, is_q, is_k, is_v, FP8: tl.constexpr):
    tl.store(out + column, value.to(out.dtype.element_ty), mask=mask & is_q)
    if FP8:
        value = value.to(out.dtype.element_ty).to(tl.float32)
        value = tl.clamp(value, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
    tl.store(k_to + column, value.to(k_to.dtype.element_ty), mask=mask & is_k)
    tl.store(v_to + column, value.to(v_to.dtype.element_ty), mask=mask & is_v)


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
    """See `phalanx.ops.rope.rope_write_kv`."""
    tokens, heads, head_dim = q.shape
    out = torch.empty((tokens, heads, head_dim), dtype=q.dtype, device=q.device)
    half = 0 if cos is None else cos.shape[-1]
    if 2 * half > head_dim:
        raise ValueError(f"rope of {2 * half} dimensions on heads of {head_dim}: cos and sin must be [T, at most D/2]")
    if tokens == 0:
        return out
    q, k, v = (t if t.stride(-1) == 1 else t.contiguous() for t in (q, k, v))
    kv_heads = k.shape[1]
    _rope_kernel[(tokens, -(-(heads + 2 * kv_heads) // _HEADS_AT_ONCE))](
        q, k, v, q if cos is None else cos.contiguous(), q if sin is None else sin.contiguous(), slot_mapping,
        k_cache, v_cache, out, q if q_norm is None else q_norm, q if k_norm is None else k_norm,
        norm_eps, q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        *k_cache.stride()[:3], *v_cache.stride()[:3],
        HEADS=heads, KV_HEADS=kv_heads, D=head_dim, HALF=half, PADDED_HALF=triton.next_power_of_2(max(half, 1)),
        PADDED_REST=triton.next_power_of_2(max(head_dim - 2 * half, 1)), BLOCK_SIZE=k_cache.shape[1],
        INTERLEAVED=interleaved, NORMED=q_norm is not None, FP8=k_cache.dtype == torch.float8_e4m3fn,
        AT_ONCE=_HEADS_AT_ONCE, num_warps=4, **early_launch(q.device),
    )  # fmt: skip
    return out


registry.register(
    "rope_write_kv", "triton", rope_write_kv, supports=on_gpu, priority=10, features=("qk_norm", "fp8_kv")
)
