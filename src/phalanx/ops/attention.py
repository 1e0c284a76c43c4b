"""Causal attention over a blocked KV cache, for any mix of prompts, prompt chunks and decode steps in one call."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from phalanx.ops import registry

# Scores held at once by the reference, in elements: bounds its memory for long contexts.
_SCORES_AT_ONCE = 1 << 25


def paged_attention(
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
    key_bias: Tensor | None = None,
    max_query_len: int,
    max_seq_len: int,
) -> Tensor:
    """Attention of each sequence's new tokens to its cached context, the new tokens included.

    Args:
        q: `[T, Hq, D]`, the new tokens of all sequences, one after the other; may be a strided view.
        k_cache, v_cache: `[blocks, block_size, Hkv, D]`, of q's dtype or float8_e4m3fn (unscaled; the optional feature
            "fp8_kv"); the keys and values of the new tokens are already in. `Hq % Hkv == 0`: query heads
            `g * Hq/Hkv ...` read KV head g. `Hkv == 0` if `Hq == 0`.
        block_table: int32 `[S, max_blocks]`, the blocks of each sequence. Entries past its context, and those before
            the window of its first new token, are not read.
        cu_seqlens_q: int32 `[S + 1]`, where the tokens of each sequence begin in q. Rows past the last are padding:
            their output is 0.
        seq_lens: int32 `[S]`, the length of each context, the new tokens included.
        scale: factor of the scores.
        window: a token at position p sees the keys p - window < j <= p; None: all j <= p.
        soft_cap: scores become `cap * tanh(score / cap)`.
        key_bias: float32 `[Hq, positions]`, added last to the scores of the key at each position of its sequence (for
            ALiBi, slope times position); no sequence may be longer. An optional feature: see `registry.register`.
        max_query_len, max_seq_len: at least the largest number of new tokens and the longest context.
    Returns:
        `[T, Hq, D]`, contiguous, of q's dtype. Cache slots that no new token sees never matter, NaN in them included.
    """
    needs = frozenset(
        feature
        for feature, wanted in (
            ("key_bias", key_bias is not None),
            ("fp8_kv", k_cache.dtype == torch.float8_e4m3fn),
        )
        if wanted
    )
    run = registry.select("attention", device=q.device, dtype=q.dtype, needs=needs)
    optional = {} if key_bias is None else {"key_bias": key_bias}
    return run(
        q,
        k_cache,
        v_cache,
        block_table,
        cu_seqlens_q,
        seq_lens,
        scale=scale,
        window=window,
        soft_cap=soft_cap,
        max_query_len=max_query_len,
        max_seq_len=max_seq_len,
        **optional,
    )


def reference_attention(
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
    key_bias: Tensor | None = None,
    max_query_len: int,
    max_seq_len: int,
) -> Tensor:
    """`paged_attention` in plain PyTorch. Sums in fp32 (float64 for float64 inputs).

    Queries are padded to the longest of the batch. On the CPU, where reading the lengths costs nothing, single queries
    stand apart from longer ones, so that a piece of a prompt does not pad the answers beside it.
    """
    attend = partial(_padded_attention, scale=scale, window=window, soft_cap=soft_cap, key_bias=key_bias)
    lengths = cu_seqlens_q.diff().long()
    single = lengths <= 1
    if q.device.type != "cpu" or single.all() or not single.any():
        return attend(
            q,
            k_cache,
            v_cache,
            block_table,
            cu_seqlens_q,
            seq_lens,
            max_query_len=max_query_len,
            max_seq_len=max_seq_len,
        )
    out = q.new_zeros(*q.shape[:2], v_cache.shape[-1])
    for these in (single, ~single):
        rows = torch.repeat_interleave(these, lengths).nonzero()[:, 0]
        starts = torch.nn.functional.pad(lengths[these].cumsum(0), (1, 0))
        out[rows] = attend(
            q[rows],
            k_cache,
            v_cache,
            block_table[these],
            starts,
            seq_lens[these],
            max_query_len=int(lengths[these].max()),
            max_seq_len=int(seq_lens[these].max()),
        )
    return out


def _padded_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    cu_seqlens_q: Tensor,
    seq_lens: Tensor,
    *,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    key_bias: Tensor | None,
    max_query_len: int,
    max_seq_len: int,
) -> Tensor:
    """Attention of `[S, max_query_len]` queries over `[S, max_seq_len]` gathered keys.

    Sequences and queries are taken in chunks whose sizes follow from the shapes alone, so that nothing is read back
    from the device.
    """
    tokens, heads, _ = q.shape
    out = q.new_zeros(tokens, heads, v_cache.shape[-1])
    sequences = seq_lens.shape[0]
    if out.numel() == 0 or sequences == 0 or max_query_len == 0 or max_seq_len == 0:
        return out
    queries_at_once = min(max_query_len, max(1, _SCORES_AT_ONCE // (heads * max_seq_len)))
    sequences_at_once = max(1, _SCORES_AT_ONCE // (heads * max_seq_len * queries_at_once))
    starts, lengths = cu_seqlens_q[:-1].long(), cu_seqlens_q.diff().long()
    for first in range(0, sequences, sequences_at_once):
        these = slice(first, min(sequences, first + sequences_at_once))
        ends = seq_lens[these, None]
        old = ends - lengths[these, None]
        begins = old * 0 if window is None else old - window + 1
        k, v = _gather_context(k_cache, v_cache, block_table[these], begins, ends, max_seq_len)
        for index in torch.arange(max_query_len, device=q.device).split(queries_at_once):
            # Query i of each sequence, its row in q, and its position; i past the sequence's own count is padding.
            real = index < lengths[these, None]
            rows = (starts[these, None] + index).clamp_max(tokens - 1)
            positions = old + index
            values = _attend(q[rows], k, v, positions, scale, window, soft_cap, key_bias).to(q.dtype)
            # Padding adds 0 to some row, each real row is added to once: exact, and no size depends on the data.
            out.index_add_(0, rows.flatten(), values.masked_fill(~real[..., None, None], 0).flatten(0, 1))
    return out


def _gather_context(
    k_cache: Tensor, v_cache: Tensor, block_table: Tensor, begins: Tensor, ends: Tensor, length: int
) -> tuple[Tensor, Tensor]:
    """The first `length` keys and values of each sequence, `[S, length, Hkv, D]`, 0 outside begins .. ends `[S, 1]`."""
    positions = torch.arange(length, device=k_cache.device)
    inside = (positions >= begins) & (positions < ends)
    columns = (positions // k_cache.shape[1]).clamp_max(block_table.shape[1] - 1)
    blocks = torch.where(inside, block_table[:, columns].long(), 0)
    offsets = (positions % k_cache.shape[1]).expand_as(blocks)
    accumulate = torch.float64 if k_cache.dtype == torch.float64 else torch.float32
    outside = ~inside[..., None, None]
    k = k_cache[blocks, offsets].to(accumulate).masked_fill(outside, 0)
    v = v_cache[blocks, offsets].to(accumulate).masked_fill(outside, 0)
    return k, v


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    key_bias: Tensor | None,
) -> Tensor:
    """q `[S, I, Hq, D]` at `positions` `[S, I]` over k, v `[S, L, Hkv, D]` -> `[S, I, Hq, D]` in k's dtype."""
    kv_heads = k.shape[2]
    grouped = q.to(k.dtype).unflatten(2, (kv_heads, -1))
    scores = torch.einsum("sighd,slgd->sghil", grouped, k) * scale
    if soft_cap is not None:
        scores = torch.tanh(scores / soft_cap) * soft_cap
    keys = torch.arange(k.shape[1], device=k.device)
    if key_bias is not None:
        # `max_seq_len` may go beyond every sequence; what lies there is not seen.
        by_key = key_bias[:, keys.clamp_max(key_bias.shape[1] - 1)].to(k.dtype)
        scores = scores + by_key.unflatten(0, (kv_heads, -1))[:, :, None]
    seen = keys <= positions[..., None]
    if window is not None:
        seen = seen & (keys > positions[..., None] - window)
    scores = scores.masked_fill(~seen[:, None, None], float("-inf"))
    # A padding row sees nothing: its softmax is NaN, and its caller discards it.
    return torch.einsum("sghil,slgd->sighd", scores.softmax(-1), v).flatten(2, 3)


registry.register("attention", "reference", reference_attention, features=("key_bias", "fp8_kv"))
