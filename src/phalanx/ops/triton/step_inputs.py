"""The inputs of a decode step, read from the runner's tables in one launch a KV group."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from phalanx.ops import registry
from phalanx.ops.step_inputs import DecodeInputs


@triton.jit
def _inputs_kernel(
    slots, positions, tokens, table, input_ids, seq_lens, slot_mapping, found,
    token_stride, table_stride, max_blocks, BLOCK_SIZE: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    real = slot >= 0
    slot = tl.where(real, slot, 0)
    position = tl.where(real, tl.load(positions + row), 0)
    last = position // BLOCK_SIZE
    # Padding reads what is there at the place of slot 0, and drops it.
    tl.store(input_ids + row, tl.where(real, tl.load(tokens + slot * token_stride + position), 0))
    tl.store(seq_lens + row, (position + 1).to(tl.int32))
    block = tl.where(real, tl.load(table + slot * table_stride + last), 0).to(tl.int64)
    tl.store(slot_mapping + row, block * BLOCK_SIZE + position % BLOCK_SIZE)
    first = last * 0
    while first <= last:
        column = first + tl.arange(0, CHUNK)
        mask = column <= last
        value = tl.load(table + slot * table_stride + column, mask=mask, other=0)
        tl.store(found + row * max_blocks + column, tl.where(real, value, 0), mask=mask)
        first += CHUNK


def decode_inputs(
    slots: Tensor, positions: Tensor, tokens: Tensor, block_tables: Sequence[Tensor], block_size: int
) -> DecodeInputs:
    """See `phalanx.ops.step_inputs.decode_inputs`."""
    rows = slots.shape[0]
    input_ids = torch.empty(rows, dtype=torch.int64, device=slots.device)
    seq_lens = torch.empty(rows, dtype=torch.int32, device=slots.device)
    mappings = [torch.empty(rows, dtype=torch.int64, device=slots.device) for _ in block_tables]
    tables = [torch.empty((rows, t.shape[1]), dtype=torch.int32, device=slots.device) for t in block_tables]
    for table, mapping, found in zip(block_tables, mappings, tables, strict=True):
        _inputs_kernel[(rows,)](
            slots, positions, tokens, table, input_ids, seq_lens, mapping, found,
            tokens.stride(0), table.stride(0), table.shape[1], BLOCK_SIZE=block_size, CHUNK=256, num_warps=1,
        )  # fmt: skip
    return DecodeInputs(input_ids, seq_lens, tuple(mappings), tuple(tables))


def _on_cuda(device: torch.device, dtype: torch.dtype) -> bool:
    return device.type == "cuda"


registry.register("decode_inputs", "triton", decode_inputs, supports=_on_cuda, priority=10)
