"""The Triton kernel of ragged prefill over the blocked KV cache: whole prompts, chunks, and single tokens among them.

Scores and tiles are those of `attention_kernels`.
"""

# Only the constexpr arguments of a kernel have annotations.
# mypy: disallow_incomplete_defs=False

from __future__ import annotations

import triton
import triton.language as tl

from phalanx.ops.triton.attention_kernels import UNALIGNED, VARYING, walk_keys


@triton.jit
def locate_tile(tile, cu_seqlens, num_sequences, num_rows, GROUP: tl.constexpr, BLOCK_M: tl.constexpr):
    """(sequence, its first row of q, its rows of q, tile inside it) of a tile of the whole batch.

    Sequence s has the tiles from `cu_seqlens[s] * GROUP // BLOCK_M + s` on, always enough of them, the last ones
    perhaps empty. What follows the last sequence, padding, is found as sequence `num_sequences`.
    """
    AT_ONCE: tl.constexpr = 128
    found = 0
    for first in tl.range(0, num_sequences + 1, AT_ONCE):
        index = first + tl.arange(0, AT_ONCE)
        there = index <= num_sequences
        starts = tl.load(cu_seqlens + index, mask=there, other=0)
        found += tl.sum((there & (starts * GROUP // BLOCK_M + index <= tile)).to(tl.int32), 0)
    sequence = found - 1
    start = tl.load(cu_seqlens + sequence)
    end = num_rows
    if sequence < num_sequences:
        end = tl.load(cu_seqlens + sequence + 1)
    return sequence, start, end - start, tile - (start * GROUP // BLOCK_M + sequence)


@triton.jit(do_not_specialize=VARYING, do_not_specialize_on_alignment=UNALIGNED)
def prefill_kernel(
    q,
    k_cache,
    v_cache,
    block_table,
    cu_seqlens,
    seq_lens,
    key_bias,
    out,
    num_sequences,
    num_rows,
    skip_single,
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
):
    """Any ragged batch; program (KV head, tile). Clears padding rows. `skip_single`: sequences of one new token are
    left to `decode_kernel`.
    """
    kv_head = tl.program_id(0)
    # The last tiles of a prompt have the longest contexts: they start first.
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    sequence, start, count, tile = locate_tile(tile, cu_seqlens, num_sequences, num_rows, GROUP, BLOCK_M)
    pairs = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    if tile * BLOCK_M >= count * GROUP:
        return
    dims = tl.arange(0, BLOCK_D)
    rows = start + pairs // GROUP
    heads = kv_head * GROUP + pairs % GROUP
    real = (pairs < count * GROUP)[:, None] & (dims < HEAD_SIZE)[None, :]
    places = (rows.to(tl.int64) * (KV_HEADS * GROUP) + heads)[:, None] * HEAD_SIZE + dims[None, :]
    if sequence == num_sequences:
        tl.store(out + places, tl.zeros([BLOCK_M, BLOCK_D], out.dtype.element_ty), mask=real)
        return
    if (skip_single != 0) & (count == 1):
        return
    old = tl.load(seq_lens + sequence) - count
    position = old + pairs // GROUP
    lowest = old + tile * BLOCK_M // GROUP
    highest = old + (tl.minimum(tile * BLOCK_M + BLOCK_M, count * GROUP) - 1) // GROUP
    # Keys `first` to `left` lie across the windows' left edges, those from `right` on across the diagonal.
    begin = 0
    first = 0
    left = 0
    if WINDOW:
        begin = tl.maximum(lowest - window + 1, 0)
        first = begin // BLOCK_N * BLOCK_N
        left = tl.minimum(tl.cdiv(tl.maximum(highest - window + 1, 0), BLOCK_N), tl.cdiv(highest + 1, BLOCK_N))
        left = left * BLOCK_N
    right = tl.maximum((lowest + 1) // BLOCK_N * BLOCK_N, left)

    q_at = q + rows.to(tl.int64)[:, None] * q_token_stride + heads[:, None] * q_head_stride + dims[None, :]
    tile_q = tl.load(q_at, mask=real, other=0.0)
    k_head = k_cache + kv_head * k_head_stride
    v_head = v_cache + kv_head * v_head_stride
    table = block_table + sequence.to(tl.int64) * table_stride
    bias_rows = key_bias + heads * bias_stride
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    if WINDOW:
        acc, total, peak = walk_keys(
            tile_q, acc, total, peak, first, tl.minimum(left, highest + 1), begin, position, window, unit, cap_in,
            cap_out, k_head, v_head, table, bias_rows, k_block_stride, k_token_stride, v_block_stride, v_token_stride,
            BLOCK_SIZE, HEAD_SIZE, BLOCK_D, BLOCK_N, True, WINDOW, CAPPED, BIASED,
        )  # fmt: skip
    acc, total, peak = walk_keys(
        tile_q, acc, total, peak, left, right, begin, position, window, unit, cap_in, cap_out, k_head, v_head, table,
        bias_rows, k_block_stride, k_token_stride, v_block_stride, v_token_stride,
        BLOCK_SIZE, HEAD_SIZE, BLOCK_D, BLOCK_N, False, WINDOW, CAPPED, BIASED,
    )  # fmt: skip
    acc, total, peak = walk_keys(
        tile_q, acc, total, peak, right, highest + 1, begin, position, window, unit, cap_in, cap_out, k_head, v_head,
        table, bias_rows, k_block_stride, k_token_stride, v_block_stride, v_token_stride,
        BLOCK_SIZE, HEAD_SIZE, BLOCK_D, BLOCK_N, True, WINDOW, CAPPED, BIASED,
    )  # fmt: skip
    result = acc * (1.0 / total)[:, None]
    tl.store(out + places, result.to(out.dtype.element_ty), mask=real)
