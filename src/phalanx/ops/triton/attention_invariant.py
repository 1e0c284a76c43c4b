"""Batch-invariant attention: a token's output has the same bits alone, among others, in a prompt, a chunk or a decode.

Every context is cut at fixed positions, whatever the batch: each piece is summed by itself, in one tile shape, and the
pieces are joined in order by arithmetic that is spelled out. One compiled kernel does all of it, so that whether the
pieces are joined in its registers or by a merge afterwards does not show. Pieces double in size every eight, so that
there are few of them at any length.
"""

# Only the constexpr arguments of a kernel have annotations.
# mypy: disallow_incomplete_defs=False

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from phalanx.ops import registry
from phalanx.ops.triton.attention import Call, Tile
from phalanx.ops.triton.attention_kernels import UNALIGNED, VARYING, walk_keys
from phalanx.ops.triton.attention_prefill_kernel import locate_tile
from phalanx.ops.triton.support import multiprocessors, on_gpu

# One shape for decodes and prompts, that being the point; its keys divide the 256 of the first pieces.
INVARIANT_TILES = {
    2: {128: Tile(64, 64, 4, 3), 256: Tile(64, 32, 8, 3)},
    4: {128: Tile(16, 32, 4, 2), 256: Tile(16, 16, 4, 2)},
}
# Bytes of the sums that are left for the merge, at most; a larger batch fills the device without sharing contexts out.
MERGE_BYTES = 1 << 27


@triton.jit
def piece_start(piece):
    """Position where a piece begins: eight pieces of 256 keys, eight of 512, ..."""
    doublings = piece // 8
    return (256 << doublings) * (8 + piece % 8) - 2048


@triton.jit
def piece_of(position):
    """The piece that a position lies in."""
    doublings = 0
    for i in tl.static_range(1, 20):
        doublings += ((position + 2048) >= (2048 << i)).to(tl.int32)
    return doublings * 8 + (position + 2048) // (256 << doublings) - 8


@triton.jit
def join(acc, total, peak, new_acc, new_total, new_peak):
    """(acc, total, peak) with another piece added. Each product is fused in one way only: equal bits wherever compiled.

    acc and new_acc [M, D], the others [M]; in a row that has seen nothing the peak is -inf.
    """
    joint = tl.maximum(peak, new_peak)
    offset = tl.where(joint == float("-inf"), 0.0, joint)
    old_share = tl.exp2(peak - offset)
    new_share = tl.exp2(new_peak - offset)
    acc = tl.fma(acc, old_share[:, None], new_acc * new_share[:, None])
    total = tl.fma(total, old_share, new_total * new_share)
    return acc, total, joint


@triton.jit(do_not_specialize=[*VARYING, "num_pieces"], do_not_specialize_on_alignment=UNALIGNED)
def invariant_kernel(
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
    num_pieces,
    num_strides,
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
    """Any ragged batch; program (KV head, tile, i of `num_strides`) takes the pieces i, i + num_strides, ...

    With one program a tile the pieces are joined here; else each leaves its sums in `parts` [rows, heads, num_pieces,
    HEAD_SIZE] and (peak, total) in `stats` [rows, heads, num_pieces, 2].
    """
    kv_head = tl.program_id(0)
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    stride = tl.program_id(2)
    sequence, start, count, tile = locate_tile(tile, cu_seqlens, num_sequences, num_rows, GROUP, BLOCK_M)
    if tile * BLOCK_M >= count * GROUP:
        return
    pairs = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    rows = (start + pairs // GROUP).to(tl.int64)
    heads = kv_head * GROUP + pairs % GROUP
    there = pairs < count * GROUP
    real = there[:, None] & (dims < HEAD_SIZE)[None, :]
    row_heads = rows * (KV_HEADS * GROUP) + heads
    places = row_heads[:, None] * HEAD_SIZE + dims[None, :]
    if sequence == num_sequences:
        if stride == 0:
            tl.store(out + places, tl.zeros([BLOCK_M, BLOCK_D], out.dtype.element_ty), mask=real)
        return
    old = tl.load(seq_lens + sequence) - count
    position = old + pairs // GROUP
    end = old + (tl.minimum(tile * BLOCK_M + BLOCK_M, count * GROUP) - 1) // GROUP + 1
    begin = 0
    if WINDOW:
        begin = tl.maximum(old + tile * BLOCK_M // GROUP - window + 1, 0)
    q_at = q + rows[:, None] * q_token_stride + heads[:, None] * q_head_stride + dims[None, :]
    tile_q = tl.load(q_at, mask=real, other=0.0)
    joined = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    joined_total = tl.zeros([BLOCK_M], tl.float32)
    joined_peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    for piece in tl.range(piece_of(begin) + stride, piece_of(end - 1) + 1, num_strides, num_stages=1):
        acc, total, peak = walk_keys(
            tile_q,
            tl.zeros([BLOCK_M, BLOCK_D], tl.float32),
            tl.zeros([BLOCK_M], tl.float32),
            tl.full([BLOCK_M], float("-inf"), tl.float32),
            tl.maximum(piece_start(piece), begin // BLOCK_N * BLOCK_N),
            tl.minimum(piece_start(piece + 1), end),
            begin,
            position,
            window,
            unit,
            cap_in,
            cap_out,
            k_cache + kv_head * k_head_stride,
            v_cache + kv_head * v_head_stride,
            block_table + sequence.to(tl.int64) * table_stride,
            key_bias + heads * bias_stride,
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
        if num_strides == 1:
            joined, joined_total, joined_peak = join(joined, joined_total, joined_peak, acc, total, peak)
        else:
            part = row_heads * num_pieces + piece
            tl.store(parts + part[:, None] * HEAD_SIZE + dims[None, :], acc, mask=real)
            tl.store(stats + part * 2, peak, mask=there)
            tl.store(stats + part * 2 + 1, total, mask=there)
    if num_strides == 1:
        result = joined * (1.0 / joined_total)[:, None]
        tl.store(out + places, result.to(out.dtype.element_ty), mask=real)


@triton.jit(do_not_specialize=[*VARYING, "num_pieces"], do_not_specialize_on_alignment=UNALIGNED)
def join_kernel(
    parts,
    stats,
    cu_seqlens,
    seq_lens,
    out,
    num_sequences,
    num_rows,
    num_pieces,
    window,
    HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """Joins what `invariant_kernel` left, in order; program (query head, row)."""
    head = tl.program_id(0)
    # One row a tile: the tile's place in its sequence is the row's.
    sequence, start, count, row = locate_tile(tl.program_id(1), cu_seqlens, num_sequences, num_rows, 1, 1)
    if (sequence == num_sequences) | (row >= count):
        return
    position = tl.load(seq_lens + sequence) - count + row
    first = 0
    if WINDOW:
        first = piece_of(tl.maximum(position - window + 1, 0))
    dims = tl.arange(0, BLOCK_D)
    one = tl.arange(0, 1)
    row_head = (start + row).to(tl.int64) * HEADS + head
    acc = tl.zeros([1, BLOCK_D], tl.float32)
    total = tl.zeros([1], tl.float32)
    peak = tl.full([1], float("-inf"), tl.float32)
    for piece in tl.range(first, piece_of(position) + 1):
        part = row_head * num_pieces + piece + one
        sums = tl.load(parts + part[:, None] * HEAD_SIZE + dims[None, :], mask=(dims < HEAD_SIZE)[None, :], other=0.0)
        acc, total, peak = join(acc, total, peak, sums, tl.load(stats + part * 2 + 1), tl.load(stats + part * 2))
    result = acc * (1.0 / total)[:, None]
    place = out + row_head * HEAD_SIZE + dims[None, :] + one[:, None]
    tl.store(place, result.to(out.dtype.element_ty), mask=(dims < HEAD_SIZE)[None, :])


def count_pieces(length: int) -> int:
    """Pieces of a context of `length` keys."""
    doublings = ((max(length, 1) + 2047) // 2048).bit_length() - 1
    return doublings * 8 + (max(length, 1) + 2047) // (256 << doublings) - 7


def invariant_attention(
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
    """See `phalanx.ops.attention.paged_attention`: each row's bits depend on its query and its own context alone.

    Raises:
        ValueError: as `phalanx.ops.triton.attention.attention`.
    """
    call = Call(q, k_cache, v_cache, block_table, cu_seqlens_q, seq_lens, scale, window, soft_cap, key_bias)
    if call.out.numel() == 0:
        return call.out
    if seq_lens.shape[0] == 0:
        return call.out.zero_()
    pieces = count_pieces(max_seq_len)
    walk_pieces(call, pieces, num_programs(call, pieces))
    return call.out


def num_programs(call: Call, pieces: int) -> int:
    """Programs that share a context out: as many as fill the device, 1 where the sums would take too much memory."""
    rows, sequences, tile = call.q.shape[0], call.seq_lens.shape[0], call.tile(INVARIANT_TILES)
    tiles = (rows * call.group // tile.rows + sequences) * call.kv_heads
    wanted = 4 * multiprocessors(call.q.device) // tiles
    size = rows * call.heads * pieces * (call.head_size + 2) * 4
    return min(wanted, pieces) if wanted > 1 and size <= MERGE_BYTES else 1


def walk_pieces(call: Call, pieces: int, programs: int) -> None:
    """The launches: `programs` for each tile, and a merge where they are several. Bits do not depend on `programs`."""
    tile = call.tile(INVARIANT_TILES)
    rows, sequences, out = call.q.shape[0], call.seq_lens.shape[0], call.out
    size = rows * call.heads * pieces if programs > 1 else 0
    parts = torch.empty(max(1, size * (call.head_size + 2)), dtype=torch.float32, device=out.device)
    stats = parts[size * call.head_size :]
    invariant_kernel[call.kv_heads, rows * call.group // tile.rows + sequences + 1, programs](
        *call.tensors,
        parts,
        stats,
        sequences,
        rows,
        pieces,
        programs,
        *call.factors,
        *call.strides,
        **call.constants,
        BLOCK_M=tile.rows,
        BLOCK_N=tile.keys,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    if programs > 1:
        join_kernel[call.heads, rows + sequences](
            parts,
            stats,
            call.cu_seqlens,
            call.seq_lens,
            out,
            sequences,
            rows,
            pieces,
            call.factors[0],
            HEADS=call.heads,
            HEAD_SIZE=call.head_size,
            BLOCK_D=call.block_d,
            WINDOW=call.window is not None,
            num_warps=1,
        )


registry.register(
    "attention",
    "triton_invariant",
    invariant_attention,
    supports=on_gpu,
    priority=5,
    features=("key_bias", "fp8_kv"),
)
