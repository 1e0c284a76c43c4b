"""Triton kernels of a mixture of experts: slots (a token and one of its experts) are placed by expert, multiplied with
the weights of their experts in tiles, and added up.

Which expert has how many slots is known to the device alone: grids follow from bounds, and tiles that hold nothing end
at once.
"""

from __future__ import annotations

import triton
import triton.language as tl

VARYING = ("slots", "tiles")


@triton.jit(do_not_specialize=VARYING)
def place_kernel(
    ids, order, tile_expert, tile_first, tile_end, slots, tiles,
    EXPERTS: tl.constexpr, BINS: tl.constexpr, BLOCK_M: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """ids [slots] -> order [slots], the slots by expert, and for each of `tiles` tiles its expert (-1 for none) and its
    range in order; grid (EXPERTS,). Every program places one expert's slots, in their order."""
    expert = tl.program_id(0)
    bins = tl.arange(0, BINS)
    inner = tl.arange(0, CHUNK)
    counts = tl.zeros((BINS,), tl.int32)
    for start in tl.range(0, slots, CHUNK):
        valid = start + inner < slots
        counts += tl.histogram(tl.load(ids + start + inner, mask=valid, other=0).to(tl.int32), BINS, mask=valid)
    needed = (counts + BLOCK_M - 1) // BLOCK_M
    before = bins < expert
    first = tl.sum(tl.where(before, counts, 0), 0)
    tile = tl.sum(tl.where(before, needed, 0), 0)
    end = first + tl.sum(tl.where(bins == expert, counts, 0), 0)
    for start in tl.range(first, end, BLOCK_M):
        at = tile + (start - first) // BLOCK_M
        tl.store(tile_expert + at, expert)
        tl.store(tile_first + at, start)
        tl.store(tile_end + at, end)
    if expert == EXPERTS - 1:
        for at in tl.range(tl.sum(needed, 0), tiles, 1):
            tl.store(tile_expert + at, -1)
    place = first
    for start in tl.range(0, slots, CHUNK):
        valid = start + inner < slots
        own = valid & (tl.load(ids + start + inner, mask=valid, other=-1).to(tl.int32) == expert)
        rank = tl.cumsum(own.to(tl.int32), 0) - 1
        tl.store(order + place + rank, start + inner, mask=own)
        place += tl.sum(own.to(tl.int32), 0)


@triton.jit
def grouped_kernel(
    x, w, y, order, tile_expert, tile_first, tile_end, n, k, x_stride,
    PER_ROW: tl.constexpr, EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """y[slot] = w[expert of slot] @ x[slot / PER_ROW]; w [experts, n, k], y [slots, n], both dense.

    Grid (cdiv(n, BLOCK_N), tiles).
    """
    tile = tl.program_id(1)
    expert = tl.load(tile_expert + tile)
    if expert < 0:
        return
    place = tl.load(tile_first + tile) + tl.arange(0, BLOCK_M)
    real = place < tl.load(tile_end + tile)
    slot = tl.load(order + place, mask=real, other=0).to(tl.int64)
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = columns < n
    weights = w + (expert.to(tl.int64) * n + tl.minimum(columns, n - 1)) * k
    inner = tl.arange(0, BLOCK_K)
    x_at = x + (slot // PER_ROW)[:, None] * x_stride + inner[None, :]
    w_at = weights[None, :] + inner[:, None]
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in tl.range(0, k, BLOCK_K):
        if EVEN_K:
            a = tl.load(x_at + start, mask=real[:, None], other=0.0)
            b = tl.load(w_at + start)
        else:
            valid = start + inner < k
            a = tl.load(x_at + start, mask=real[:, None] & valid[None, :], other=0.0)
            b = tl.load(w_at + start, mask=valid[:, None], other=0.0)
        acc = tl.dot(a, b, acc, input_precision="ieee")
    y_at = y + slot[:, None] * n + columns[None, :]
    tl.store(y_at, acc.to(y.dtype.element_ty), mask=real[:, None] & inside[None, :])


@triton.jit
def combine_kernel(found, weights, out, width, PER_TOKEN: tl.constexpr, BLOCK: tl.constexpr):
    """found [tokens, PER_TOKEN, width], weights float32 [tokens, PER_TOKEN] -> out [tokens, width], added up in float32
    in the order of the slots; grid (tokens, cdiv(width, BLOCK))."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    total = tl.zeros((BLOCK,), tl.float32)
    for place in tl.static_range(PER_TOKEN):
        slot = token * PER_TOKEN + place
        total += tl.load(found + slot * width + columns, mask=inside, other=0.0).to(tl.float32) * tl.load(
            weights + slot
        )
    tl.store(out + token * width + columns, total.to(out.dtype.element_ty), mask=inside)
