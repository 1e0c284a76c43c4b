"""Mixtures of experts on CUDA without a word from the host: products of all experts in one kernel."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from phalanx.ops import registry
from phalanx.ops.moe import MaskedExperts, PreparedExperts
from phalanx.ops.triton.grouped_kernels import combine_kernel, grouped_kernel, place_kernel
from phalanx.ops.triton.support import on_gpu


class Tile(NamedTuple):
    """Slots, output columns and K of a step."""

    rows: int
    columns: int
    inner: int
    warps: int
    stages: int


class Placed(NamedTuple):
    """Slots by expert: `order` [slots] and, for each tile, its expert (-1 for none) and its range in `order`."""

    order: Tensor
    tile_expert: Tensor
    tile_first: Tensor
    tile_end: Tensor


def tile_for(slots: int, experts: int, element_size: int) -> Tile:
    """By the number of slots that an expert has on average."""
    if element_size > 2:
        return Tile(16, 32, 32, 4, 2)
    mean = slots / experts
    if mean <= 16:
        return Tile(16, 64, 128, 4, 4)
    return Tile(64, 128, 64, 4, 4) if mean <= 96 else Tile(128, 128, 64, 8, 3)


def place(ids: Tensor, experts: int, rows: int) -> Placed:
    """The slots of ids [tokens, k], of experts from 0 to `experts` - 1, in tiles of at most `rows` of one expert."""
    slots = ids.numel()
    # Every expert that has any slots has at most one tile that is not full.
    tiles = min(slots, slots // rows + experts)
    order, *rest = (torch.empty(size, dtype=torch.int32, device=ids.device) for size in (slots, tiles, tiles, tiles))
    bins = max(16, triton.next_power_of_2(experts))
    chunk = max(16, min(1024, triton.next_power_of_2(slots)))
    place_kernel[(experts,)](
        ids.contiguous(), order, *rest, slots, tiles,
        EXPERTS=experts, BINS=bins, BLOCK_M=rows, CHUNK=chunk, num_warps=4,
    )  # fmt: skip
    return Placed(order, *rest)


def grouped_linear(x: Tensor, weight: Tensor, placed: Placed, per_row: int, tile: Tile) -> Tensor:
    """Every slot's row of x times the weight of its expert.

    Args:
        x: [slots / per_row, in], rows dense; a row serves `per_row` slots in turn.
        weight: [experts, out, in], dense.

    Returns:
        [slots, out].
    """
    _, n, k = weight.shape
    out = torch.empty((placed.order.shape[0], n), dtype=x.dtype, device=x.device)
    grouped_kernel[triton.cdiv(n, tile.columns), placed.tile_expert.shape[0]](
        x, weight, out, *placed, n, k, x.stride(0), PER_ROW=per_row, EVEN_K=k % tile.inner == 0,
        BLOCK_M=tile.rows, BLOCK_N=tile.columns, BLOCK_K=tile.inner, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out


class GroupedExperts(MaskedExperts):
    """Slots placed by expert on the device, then one kernel for the products of all experts.

    Weights are held as by 'masked', whose checkpoints it reads and writes.
    """

    layout = "masked"

    def prepare(self, weights: Iterable[Tensor], count: int, linear_layout: str | None) -> PreparedExperts:
        try:
            experts = super().prepare(weights, count, linear_layout)
        except ValueError as error:
            raise ValueError(str(error).replace("'masked'", "'grouped'")) from None
        return replace(experts, data=experts.data.contiguous())

    def apply(
        self,
        x: Tensor,
        weights: Tensor,
        ids: Tensor,
        first: PreparedExperts,
        second: PreparedExperts,
        activate: Callable[[Tensor], Tensor],
    ) -> Tensor:
        tokens, per_token = ids.shape
        experts, width, _ = second.shape
        out = torch.empty((tokens, width), dtype=x.dtype, device=x.device)
        if not out.numel():
            return out
        if not second.shape[2]:
            return out.zero_()
        x = x if x.stride(1) == 1 else x.contiguous()
        tile = tile_for(tokens * per_token, experts, x.element_size())
        placed = place(ids, experts, tile.rows)
        inner = activate(grouped_linear(x, first.data, placed, per_token, tile))
        found = grouped_linear(inner, second.data, placed, 1, tile)
        block = max(16, min(1024, triton.next_power_of_2(width)))
        combine_kernel[tokens, triton.cdiv(width, block)](
            found, weights.contiguous(), out, width, PER_TOKEN=per_token, BLOCK=block, num_warps=4
        )
        return out


registry.register("moe", "grouped", GroupedExperts(), supports=on_gpu, priority=10)
