"""What a step that decodes one token a sequence reads of the runner's tables, for all its rows at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from phalanx.ops import registry


@dataclass(frozen=True)
class DecodeInputs:
    """Inputs of S rows: input_ids int64 [S], seq_lens int32 [S], and a KV group each slot_mapping int64 [S] and
    block_tables int32 [S, max_blocks], of which only a row's first blocks mean anything."""

    input_ids: Tensor
    seq_lens: Tensor
    slot_mapping: tuple[Tensor, ...]
    block_tables: tuple[Tensor, ...]


def decode_inputs(
    slots: Tensor, positions: Tensor, tokens: Tensor, block_tables: Sequence[Tensor], block_size: int
) -> DecodeInputs:
    """The inputs of one new token a row.

    Args:
        slots: int64 [S], each row's place in the tables; -1 for padding: token 0 at position 0 of block 0, the dummy.
        positions: int64 [S], of the new token in its sequence.
        tokens: int64 [slots, columns], the new token's id at its position.
        block_tables: int32 [slots, max_blocks] each.
        block_size: tokens of a block.
    """
    run = registry.select("decode_inputs", device=tokens.device, dtype=tokens.dtype)
    result: DecodeInputs = run(slots, positions, tokens, block_tables, block_size)
    return result


def reference_decode_inputs(
    slots: Tensor, positions: Tensor, tokens: Tensor, block_tables: Sequence[Tensor], block_size: int
) -> DecodeInputs:
    """`decode_inputs` in plain PyTorch."""
    real = slots >= 0
    rows, places = slots.clamp_min(0), torch.where(real, positions, 0)
    columns, offsets = places // block_size, places % block_size
    tables = tuple(torch.where(real[:, None], table[rows], 0) for table in block_tables)
    return DecodeInputs(
        input_ids=torch.where(real, tokens[rows, places], 0),
        seq_lens=(places + 1).to(torch.int32),
        slot_mapping=tuple(table.gather(1, columns[:, None])[:, 0].long() * block_size + offsets for table in tables),
        block_tables=tables,
    )


registry.register("decode_inputs", "reference", reference_decode_inputs)
