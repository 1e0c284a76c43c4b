"""RaggedBatch: everything that one forward needs to know of its sequences, as tensors on the model's device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class RaggedBatch:
    """One step of ragged sequences: T tokens of S sequences, without padding between them.

    The tensors are what a captured graph replays on; the plain integers are fixed at capture.

    Attributes:
        input_ids: int64 [T].
        positions: int64 [T], each token's place in its sequence.
        cu_seqlens_q: int32 [S + 1], where each sequence's new tokens begin.
        seq_lens: int32 [S], context of each sequence, the new tokens included.
        slot_mapping: one int64 [T] a KV group: ``block * block_size + offset`` that a token's K and V go to.
        block_tables: one int32 [S, max_blocks] a KV group; what lies beyond a sequence's blocks is never read.
        logits_indices: int64 [R], the rows of the T tokens whose logits are wanted.
        rope_lens: int64 [T], the length that decides a token's rope frequencies, where they depend on one.
        max_query_len: most new tokens of a sequence.
        max_seq_len: upper bound of ``seq_lens``.
    """

    input_ids: Tensor
    positions: Tensor
    cu_seqlens_q: Tensor
    seq_lens: Tensor
    slot_mapping: tuple[Tensor, ...]
    block_tables: tuple[Tensor, ...]
    logits_indices: Tensor
    rope_lens: Tensor
    max_query_len: int
    max_seq_len: int

    @property
    def num_tokens(self) -> int:
        return int(self.input_ids.shape[0])

    @property
    def num_seqs(self) -> int:
        return int(self.seq_lens.shape[0])

    @property
    def device(self) -> torch.device:
        return self.input_ids.device
