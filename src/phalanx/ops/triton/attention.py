"""Attention over the blocked KV cache by Triton: which kernels run, in which sizes."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from phalanx.ops import registry
from phalanx.ops.triton.attention_kernels import decode_kernel, merge_kernel
from phalanx.ops.triton.attention_prefill_kernel import prefill_kernel
from phalanx.ops.triton.support import launches_early, multiprocessors, on_gpu

_LOG2_E = math.log2(math.e)


class Tile(NamedTuple):
    """Sizes of a kernel: rows of queries (unused by decodes, which take what one KV head needs), keys a step."""

    rows: int
    keys: int
    warps: int
    stages: int


class MergeTile(NamedTuple):
    """Sizes of the kernel that joins splits: query heads and warps of a program, and splits that it reads together."""

    heads: int
    splits: int
    warps: int


# By element size of q, then by the largest head size (a power of two): the first entry that is large enough.
DECODE_TILES = {
    2: {128: Tile(0, 64, 4, 3), 256: Tile(0, 32, 4, 3)},
    4: {256: Tile(0, 16, 4, 2)},
}
# The same where a batch is too small to fill the device, so that its contexts are split finely.
FEW_DECODE_TILES = DECODE_TILES | {2: DECODE_TILES[2] | {128: Tile(0, 64, 4, 2)}}
# And where it is large: longer steps suit contexts of unequal lengths, which served ones have (equal ones lose 3 %).
MANY_DECODE_TILES = DECODE_TILES | {2: DECODE_TILES[2] | {128: Tile(0, 128, 4, 3)}}
PREFILL_TILES = {
    2: {64: Tile(128, 128, 8, 3), 128: Tile(128, 64, 8, 5), 256: Tile(128, 64, 8, 2)},
    4: {256: Tile(16, 32, 8, 2)},
}
# As measured on an H200: programs of a decode for each multiprocessor, where contexts are long enough; keys of a split
# for each program that there is without splits, and at least and at most (long splits leave the longest contexts for
# the end, short ones cost batches of equal contexts); up to how many such programs a batch is small, and from how many
# it is large.
DECODE_WAVES = 16
SPLIT_KEYS, LEAST_SPLIT_KEYS, MOST_SPLIT_KEYS = 2, 64, 640
FEW_PROGRAMS, MANY_PROGRAMS = 64, 513
MAX_SPLITS = 64
# One warp keeps the splits of a head in its registers.
MERGES, FEW_MERGES = MergeTile(8, 4, 4), MergeTile(1, 16, 1)
# A sequence of one token that walks no more keys than this is not worth kernels of its own in a mixed batch.
SHORT_CONTEXT = 512


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
    key_bias: Tensor | None = None,
    max_query_len: int,
    max_seq_len: int,
) -> Tensor:
    """See `phalanx.ops.attention.paged_attention`.

    Sequences of one new token go to the split-KV kernel, all others to the prefill kernel; which are which is decided
    on the device. Caches may be of q's dtype or float8_e4m3fn.

    Raises:
        ValueError: shapes, dtypes or strides that the kernels do not take; a scale that is not positive.
    """
    call = Call(q, k_cache, v_cache, block_table, cu_seqlens_q, seq_lens, scale, window, soft_cap, key_bias)
    if call.out.numel() == 0:
        return call.out
    sequences, rows = seq_lens.shape[0], q.shape[0]
    if sequences == 0:
        return call.out.zero_()
    if max_query_len <= 1:
        decode(call, max(sequences, rows), rows, decode_splits(call, max_seq_len))
        return call.out
    # Where all lengths are equal, none is 1.
    mixed = rows < sequences * max_query_len and max_seq_len > SHORT_CONTEXT
    prefill(call, mixed)
    if mixed:
        decode(call, sequences, 0, decode_splits(call, max_seq_len))
    return call.out


class Call:
    """What the kernels of one call share: checked tensors, and the arguments in their order."""

    def __init__(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        block_table: Tensor,
        cu_seqlens_q: Tensor,
        seq_lens: Tensor,
        scale: float,
        window: int | None,
        soft_cap: float | None,
        key_bias: Tensor | None,
    ) -> None:
        rows, heads, head_size = q.shape
        if k_cache.shape != v_cache.shape or k_cache.dim() != 4 or k_cache.shape[3] != head_size:
            raise ValueError(
                f"caches of [blocks, block_size, kv_heads, {head_size}] are expected beside q {tuple(q.shape)}; "
                f"got {tuple(k_cache.shape)} and {tuple(v_cache.shape)}"
            )
        if not k_cache.dtype == v_cache.dtype or k_cache.dtype not in (q.dtype, torch.float8_e4m3fn):
            raise ValueError(
                f"caches must both be of {q.dtype}, as q, or of float8_e4m3fn; got {k_cache.dtype} and {v_cache.dtype}"
            )
        if k_cache.stride(3) != 1 or v_cache.stride(3) != 1 or block_table.stride(-1) != 1:
            raise ValueError("the last dimension of the caches and of the block table must be dense")
        if block_table.dtype != torch.int32 or cu_seqlens_q.dtype != torch.int32 or seq_lens.dtype != torch.int32:
            raise ValueError(
                f"block_table, cu_seqlens_q and seq_lens must be int32; got {block_table.dtype}, "
                f"{cu_seqlens_q.dtype} and {seq_lens.dtype}"
            )
        if not scale > 0:
            raise ValueError(f"the Triton attention needs a positive scale; got {scale}")
        if head_size > 256:
            raise ValueError(f"the Triton attention takes heads of up to 256; got {head_size}")
        self.kv_heads = k_cache.shape[2]
        if heads and (not self.kv_heads or heads % self.kv_heads):
            raise ValueError(f"{heads} query heads do not divide over {self.kv_heads} KV heads")
        self.q = q = q if q.stride(2) == 1 else q.contiguous()
        self.cu_seqlens, self.seq_lens = cu_seqlens_q, seq_lens
        self.heads, self.head_size = heads, head_size
        self.group = heads // self.kv_heads if self.kv_heads else 0
        self.block_d = max(16, triton.next_power_of_2(head_size))
        self.out = torch.empty((rows, heads, head_size), dtype=q.dtype, device=q.device)
        self.window = window
        # An unused pointer must be one all the same.
        bias = self.out if key_bias is None else key_bias
        self.tensors = (q, k_cache, v_cache, block_table, cu_seqlens_q, seq_lens, bias, self.out)
        cap_in, cap_out = (0.0, 0.0) if soft_cap is None else (2 * _LOG2_E * scale / soft_cap, soft_cap * _LOG2_E)
        self.factors = (window or 0, scale * _LOG2_E, cap_in, cap_out)
        self.strides = (
            *q.stride()[:2], *k_cache.stride()[:3], *v_cache.stride()[:3], block_table.stride(0),
            0 if key_bias is None else key_bias.stride(0),
        )  # fmt: skip
        self.constants = {
            "KV_HEADS": self.kv_heads,
            "GROUP": self.group,
            "BLOCK_SIZE": k_cache.shape[1],
            "HEAD_SIZE": head_size,
            "BLOCK_D": self.block_d,
            "WINDOW": window is not None,
            "CAPPED": soft_cap is not None,
            "BIASED": key_bias is not None,
        }

    def tile(self, table: dict[int, dict[int, Tile]]) -> Tile:
        sizes = table[self.q.element_size()]
        return sizes[min(size for size in sizes if size >= self.block_d)]


class Splits(NamedTuple):
    """How decodes share contexts out: at most `most` splits of at least `min_keys` keys. `programs`: as many as there
    are without splits."""

    most: int
    min_keys: int
    programs: int

    @property
    def few(self) -> bool:
        """Whether the batch is small."""
        return self.programs <= FEW_PROGRAMS

    @property
    def tiles(self) -> dict[int, dict[int, Tile]]:
        """The sizes for a batch that is as large."""
        if self.few:
            return FEW_DECODE_TILES
        return DECODE_TILES if self.programs < MANY_PROGRAMS else MANY_DECODE_TILES


def decode_splits(call: Call, max_seq_len: int) -> Splits:
    """By shapes alone; the kernel shares out what the context really has."""
    programs = call.seq_lens.shape[0] * call.kv_heads * triton.cdiv(call.group, 64)
    wanted = DECODE_WAVES * multiprocessors(call.q.device) / programs
    count = 2 ** max(0, round(math.log2(wanted)))
    min_keys = min(max(SPLIT_KEYS * programs, LEAST_SPLIT_KEYS), MOST_SPLIT_KEYS)
    return Splits(max(1, min(count, MAX_SPLITS, max_seq_len // min_keys)), min_keys, programs)


def decode(call: Call, programs: int, clear: int, splits: Splits, tile: Tile | None = None) -> None:
    """Sequences of one new token; `clear`: rows of out that are cleared where they are padding."""
    tile = tile or call.tile(splits.tiles)
    rows = max(16, min(64, triton.next_power_of_2(call.group)))
    sequences, out = call.seq_lens.shape[0], call.out
    count, min_blocks = splits.most, triton.cdiv(splits.min_keys, tile.keys)
    # Of this type where there are no parts too: another one would be another variant of the kernel.
    sums = sequences * call.heads * count * call.head_size if count > 1 else 0
    parts = torch.empty(sums + max(2, sums // call.head_size * 2), dtype=torch.float32, device=out.device)
    stats = parts[sums:]
    pdl = launches_early(out.device)
    options = {"launch_pdl": True} if pdl else {}
    decode_kernel[call.kv_heads * triton.cdiv(call.group, rows), programs, count](
        *call.tensors,
        parts,
        stats,
        sequences,
        clear,
        count,
        min_blocks,
        *call.factors,
        *call.strides,
        **call.constants,
        BLOCK_M=rows,
        BLOCK_N=tile.keys,
        PDL=pdl,
        num_warps=tile.warps,
        num_stages=tile.stages,
        **options,
    )
    if count > 1:
        # Of few sequences each head is joined at once; of many, programs that find nothing to join would take long.
        merge = FEW_MERGES if splits.few else MERGES
        merge_kernel[triton.cdiv(call.heads, merge.heads), sequences](
            parts,
            stats,
            call.cu_seqlens,
            call.seq_lens,
            out,
            count,
            min_blocks,
            call.factors[0],
            HEADS=call.heads,
            HEAD_SIZE=call.head_size,
            BLOCK_D=call.block_d,
            BLOCK_N=tile.keys,
            WINDOW=call.window is not None,
            BLOCK_H=merge.heads,
            AT_ONCE=merge.splits,
            EAGER=splits.few,
            PDL=pdl,
            num_warps=merge.warps,
            **options,
        )


def prefill(call: Call, skip_single: bool, tile: Tile | None = None) -> None:
    """All sequences, or all but those of one new token; padding rows are cleared."""
    tile = tile or call.tile(PREFILL_TILES)
    sequences, rows = call.seq_lens.shape[0], call.q.shape[0]
    # Every sequence has as many tiles as it can need, and so have the padding rows behind them.
    tiles = rows * call.group // tile.rows + sequences + 1
    prefill_kernel[call.kv_heads, tiles](
        *call.tensors,
        sequences,
        rows,
        int(skip_single),
        *call.factors,
        *call.strides,
        **call.constants,
        BLOCK_M=tile.rows,
        BLOCK_N=tile.keys,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )


registry.register("attention", "triton", attention, supports=on_gpu, priority=10, features=("key_bias", "fp8_kv"))
