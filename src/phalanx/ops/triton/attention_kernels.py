"""Triton kernels of attention over the blocked KV cache: the walk over the keys of a tile, and split-KV
decode with its merge.

Scores are kept in units of log2, so that the softmax needs exp2 alone. A tile's rows are (token, query head) pairs of
one KV head, tokens first: all query heads that share a KV head read it once.
"""

# Only the constexpr arguments of a kernel have annotations.
# mypy: disallow_incomplete_defs=False

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

# What varies from step to step must not make another variant of a kernel.
VARYING = ("table_stride", "num_sequences", "num_rows", "num_splits", "min_blocks", "skip_single", "num_strides")
UNALIGNED = ("block_table", "cu_seqlens", "seq_lens")


@triton.jit
def walk_keys(
    q,
    acc,
    total,
    peak,
    first,
    last,
    begin,
    position,
    window,
    unit,
    cap_in,
    cap_out,
    k_head,
    v_head,
    table,
    bias_rows,
    k_block_stride,
    k_token_stride,
    v_block_stride,
    v_token_stride,
    BLOCK_SIZE: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
    WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
    BIASED: tl.constexpr,
):
    """Online softmax of a tile's rows over the keys `first` (a multiple of BLOCK_N) to `last`.

    q [M, BLOCK_D] at `position` [M]; acc [M, BLOCK_D], total [M] and peak [M] are the running sums and maximum.
    Without MASKED every row sees every key of these blocks. `begin`: keys before it are not read.
    """
    dims = tl.arange(0, BLOCK_D)
    for start in tl.range(first, last, BLOCK_N):
        keys = start + tl.arange(0, BLOCK_N)
        if MASKED:
            readable = keys < last
            if WINDOW:
                readable = readable & (keys >= begin)
            block = tl.load(table + keys // BLOCK_SIZE, mask=readable, other=0).to(tl.int64)
            wanted = readable[:, None]
            if HEAD_SIZE != BLOCK_D:
                wanted = wanted & (dims < HEAD_SIZE)[None, :]
        else:
            block = tl.load(table + keys // BLOCK_SIZE).to(tl.int64)
            wanted = None
            if HEAD_SIZE != BLOCK_D:
                wanted = tl.broadcast_to((dims < HEAD_SIZE)[None, :], (BLOCK_N, BLOCK_D))
        slot = keys % BLOCK_SIZE
        k_at = k_head + (block * k_block_stride + slot * k_token_stride)[:, None] + dims[None, :]
        v_at = v_head + (block * v_block_stride + slot * v_token_stride)[:, None] + dims[None, :]
        if wanted is None:
            k = tl.load(k_at)
            v = tl.load(v_at)
        else:
            k = tl.load(k_at, mask=wanted, other=0.0)
            v = tl.load(v_at, mask=wanted, other=0.0)
        scores = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee")
        if CAPPED:
            # cap * tanh(x / cap), by exp2; an overflow to infinity gives cap.
            scores = (1.0 - 2.0 / (1.0 + tl.exp2(scores * cap_in))) * cap_out
        elif BIASED:
            scores = scores * unit
        if BIASED:
            if MASKED:
                bias = tl.load(bias_rows[:, None] + keys[None, :], mask=readable[None, :], other=0.0)
            else:
                bias = tl.load(bias_rows[:, None] + keys[None, :])
            scores = tl.fma(bias, 1.4426950408889634, scores)
        if MASKED:
            seen = keys[None, :] <= position[:, None]
            if WINDOW:
                seen = seen & (keys[None, :] > position[:, None] - window)
            scores = tl.where(seen, scores, float("-inf"))
        # The scale is positive, so the maximum may be scaled instead of every score before it.
        factor = unit
        if CAPPED or BIASED:
            factor = 1.0
        new_peak = tl.maximum(peak, tl.max(scores, 1) * factor)
        # A row that has seen nothing yet has no maximum.
        offset = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        weights = tl.exp2(tl.fma(scores, factor, -offset[:, None]))
        shrink = tl.exp2(peak - offset)
        total = tl.fma(total, shrink, tl.sum(weights, 1))
        acc = acc * shrink[:, None]
        acc = tl.dot(weights.to(q.dtype), v.to(q.dtype), acc, input_precision="ieee")
        peak = new_peak
    return acc, total, peak


@triton.jit
def splits_of(context, window, num_splits, min_blocks, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr):
    """(first key that the last token sees, key where splits begin, keys of a split, splits that are not empty)."""
    begin = 0
    if WINDOW:
        begin = tl.maximum(context - window, 0)
    aligned = begin // BLOCK_N * BLOCK_N
    blocks = tl.cdiv(context - aligned, BLOCK_N)
    # No split has fewer blocks than min_blocks, so none is left with a rest that is not worth a merge.
    per_split = tl.cdiv(blocks, tl.maximum(1, tl.minimum(num_splits, blocks // min_blocks)))
    return begin, aligned, per_split * BLOCK_N, tl.cdiv(blocks, tl.maximum(per_split, 1))


@triton.jit(do_not_specialize=VARYING, do_not_specialize_on_alignment=UNALIGNED)
def decode_kernel(
    q,
    k_cache,
    v_cache,
    block_table,
    cu_seqlens,
    seq_lens,
    key_bias,
    out,
    parts,
    stats,
    num_sequences,
    num_rows,
    num_splits,
    min_blocks,
    window,
    unit,
    cap_in,
    cap_out,
    q_token_stride,
    q_head_stride,
    k_block_stride,
    k_token_stride,
    k_head_stride,
    v_block_stride,
    v_token_stride,
    v_head_stride,
    table_stride,
    bias_stride,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
    BIASED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Sequences of one new token; program (KV head and tile of its query heads, sequence or row, split).

    A context of one split is finished here; of several, each leaves its sums in `parts` [sequences, heads, splits,
    HEAD_SIZE] and (peak, total) in `stats` [sequences, heads, splits, 2]. Other sequences are left alone. Program i
    also clears row i where that is padding (num_rows 0: nothing is cleared).
    """
    kv_head = tl.program_id(0) % KV_HEADS
    tile = tl.program_id(0) // KV_HEADS
    sequence = tl.program_id(1)
    # The last ones to start are those for which short contexts have nothing to do.
    split = tl.program_id(2)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    # All at once: one that waited for another would take as long again.
    last_row = tl.load(cu_seqlens + num_sequences)
    known = tl.minimum(sequence, num_sequences - 1)
    row = tl.load(cu_seqlens + known).to(tl.int64)
    row_after = tl.load(cu_seqlens + known + 1)
    context = tl.load(seq_lens + known)
    dims = tl.arange(0, BLOCK_D)
    members = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    heads = kv_head * GROUP + members
    real = (members < GROUP)[:, None] & (dims < HEAD_SIZE)[None, :]
    places = heads[:, None] * HEAD_SIZE + dims[None, :]
    row_size = KV_HEADS * GROUP * HEAD_SIZE
    if split == 0 and sequence < num_rows and sequence >= last_row:
        zeros = tl.zeros([BLOCK_M, BLOCK_D], out.dtype.element_ty)
        tl.store(out + sequence.to(tl.int64) * row_size + places, zeros, mask=real)
    if sequence >= num_sequences or row_after - row != 1:
        return
    begin, aligned, size, live = splits_of(context, window, num_splits, min_blocks, BLOCK_N, WINDOW)
    if split >= live:
        return
    first = aligned + split * size
    tile_q = tl.load(q + row * q_token_stride + heads[:, None] * q_head_stride + dims[None, :], mask=real, other=0.0)
    acc, total, peak = walk_keys(
        tile_q,
        tl.zeros([BLOCK_M, BLOCK_D], tl.float32),
        tl.zeros([BLOCK_M], tl.float32),
        tl.full([BLOCK_M], float("-inf"), tl.float32),
        first,
        tl.minimum(first + size, context),
        begin,
        tl.full([BLOCK_M], 0, tl.int32) + (context - 1),
        window,
        unit,
        cap_in,
        cap_out,
        k_cache + kv_head * k_head_stride,
        v_cache + kv_head * v_head_stride,
        block_table + sequence.to(tl.int64) * table_stride,
        key_bias + tl.where(members < GROUP, heads, 0) * bias_stride,
        k_block_stride,
        k_token_stride,
        v_block_stride,
        v_token_stride,
        BLOCK_SIZE,
        HEAD_SIZE,
        BLOCK_D,
        BLOCK_N,
        True,
        WINDOW,
        CAPPED,
        BIASED,
    )
    if live == 1:
        result = acc * (1.0 / total)[:, None]
        tl.store(out + row * row_size + places, result.to(out.dtype.element_ty), mask=real)
    else:
        part = (sequence.to(tl.int64) * (KV_HEADS * GROUP) + heads) * num_splits + split
        tl.store(parts + part[:, None] * HEAD_SIZE + dims[None, :], acc, mask=real)
        tl.store(stats + part * 2, peak, mask=members < GROUP)
        tl.store(stats + part * 2 + 1, total, mask=members < GROUP)


@triton.jit
def load_splits(parts, stats, part, split, end, dims, there, HEAD_SIZE: tl.constexpr):
    """(peaks [H, S], totals [H, S], sums [H, S, D]) of the splits `split` [S] before `end` of heads, whose first parts
    are `part` [H], and which are `there` [H]."""
    wanted = there[:, None] & (split < end)[None, :]
    at = part[:, None] + split[None, :]
    peaks = tl.load(stats + at * 2, mask=wanted, other=0.0)
    totals = tl.load(stats + at * 2 + 1, mask=wanted, other=0.0)
    whole = wanted[:, :, None] & (dims < HEAD_SIZE)[None, None, :]
    return peaks, totals, tl.load(parts + at[:, :, None] * HEAD_SIZE + dims[None, None, :], mask=whole, other=0.0)


@triton.jit(do_not_specialize=VARYING, do_not_specialize_on_alignment=UNALIGNED)
def merge_kernel(
    parts,
    stats,
    cu_seqlens,
    seq_lens,
    out,
    num_splits,
    min_blocks,
    window,
    HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK_H: tl.constexpr,
    AT_ONCE: tl.constexpr,
    EAGER: tl.constexpr,
    PDL: tl.constexpr,
):
    """Joins the splits of `decode_kernel`, AT_ONCE at a time; program (BLOCK_H query heads, sequence). EAGER: splits
    are read before it is known how many there are, since what is read costs less than to wait for that."""
    heads = tl.program_id(0) * BLOCK_H + tl.arange(0, BLOCK_H)
    sequence = tl.program_id(1)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.load(cu_seqlens + sequence).to(tl.int64)
    row_after = tl.load(cu_seqlens + sequence + 1)
    context = tl.load(seq_lens + sequence)
    dims = tl.arange(0, BLOCK_D)
    real = heads < HEADS
    part = (sequence.to(tl.int64) * HEADS + heads) * num_splits
    split = tl.arange(0, AT_ONCE)
    if EAGER:
        peaks, totals, sums = load_splits(parts, stats, part, split, num_splits, dims, real, HEAD_SIZE)
    if row_after - row != 1:
        return
    _, _, _, live = splits_of(context, window, num_splits, min_blocks, BLOCK_N, WINDOW)
    if live == 1:
        return
    if not EAGER:
        peaks, totals, sums = load_splits(parts, stats, part, split, live, dims, real, HEAD_SIZE)
    acc = tl.zeros([BLOCK_H, BLOCK_D], tl.float32)
    total = tl.zeros([BLOCK_H], tl.float32)
    peak = tl.full([BLOCK_H], float("-inf"), tl.float32)
    for first in tl.range(0, live, AT_ONCE):
        there = (first + split < live)[None, :]
        new_peak = tl.maximum(peak, tl.max(tl.where(there, peaks, float("-inf")), 1))
        weights = tl.where(there, tl.exp2(peaks - new_peak[:, None]), 0.0)
        shrink = tl.exp2(peak - new_peak)
        joined = tl.where(there[:, :, None], sums * weights[:, :, None], 0.0)
        acc = acc * shrink[:, None] + tl.sum(joined, 1)
        total = total * shrink + tl.sum(tl.where(there, totals * weights, 0.0), 1)
        peak = new_peak
        peaks, totals, sums = load_splits(parts, stats, part, first + AT_ONCE + split, live, dims, real, HEAD_SIZE)
    result = acc * (1.0 / total)[:, None]
    place = out + (row * HEADS + heads)[:, None] * HEAD_SIZE + dims[None, :]
    tl.store(place, result.to(out.dtype.element_ty), mask=real[:, None] & (dims < HEAD_SIZE)[None, :])
