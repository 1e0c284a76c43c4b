"""DecodeStep: a step in which each sequence adds one token and draws the likeliest next, in fixed shapes.

Everything that changes from step to step lies in tensors that stay where they are, so that a CUDA graph can hold the
whole step: reading the last tokens, the forward, and writing the next ones. Rows beyond the real sequences are padding
(slot -1): they write to the dummy block only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from phalanx.engine.staging import Staging
from phalanx.engine.step import LOGITS_LAST, Row, only_decodes
from phalanx.models.base import TransformerModel
from phalanx.ops.batch import RaggedBatch
from phalanx.ops.sampling import draw_greedy
from phalanx.ops.step_inputs import decode_inputs

_PADDING = np.array([[-1], [0], [1]])
"""Slot, position and rope length of a row that is no sequence."""


def decode_sizes(largest: int) -> list[int]:
    """Numbers of rows worth a graph of their own: small ones, then every eighth, where matrix tiles end."""
    return sorted({size for size in (1, 2, 4, *range(8, largest, 8), largest) if size <= largest})


@dataclass(frozen=True)
class Decoded:
    """What a decode step left on the device: this rank's float32 logits [size, vocab of the rank] and the likeliest
    tokens, int64 [size]."""

    logits: Tensor
    tokens: Tensor


@dataclass(frozen=True)
class Decoding:
    """Rows that each add one token and draw the next from its logits alone; int64 [rows] each, as in ``Row``."""

    slots: np.ndarray[Any, Any]
    starts: np.ndarray[Any, Any]
    rope_lens: np.ndarray[Any, Any]

    @classmethod
    def of(cls, rows: Sequence[Row]) -> Decoding | None:
        """These rows, if they all are such."""
        if not only_decodes(rows):
            return None
        return cls(
            np.array([row.slot for row in rows]),
            np.array([row.start for row in rows]),
            np.array([row.rope_len for row in rows]),
        )

    def __len__(self) -> int:
        return len(self.slots)

    def further(self) -> Decoding:
        """The same rows, a token further."""
        return Decoding(self.slots, self.starts + 1, self.rope_lens)

    def rows(self) -> list[Row]:
        """One by one; their blocks are known."""
        each = zip(self.slots.tolist(), self.starts.tolist(), self.rope_lens.tolist(), strict=True)
        return [Row(slot, start, 1, LOGITS_LAST, True, rope_len, 0, []) for slot, start, rope_len in each]


class DecodeStep:
    """Computes decode steps of at most ``max(sizes)`` rows, from captured graphs where there are some.

    Args:
        model: with its parameters and KV cache in place.
        tokens: the runner's token table, int64 [slots, columns].
        block_tables: its block tables, int32 [slots, max_blocks] a KV group.
        staging: of the same device.
        sizes: numbers of rows that a step is padded to.
    """

    def __init__(
        self,
        model: TransformerModel,
        tokens: Tensor,
        block_tables: Sequence[Tensor],
        staging: Staging,
        sizes: Sequence[int],
    ) -> None:
        self.model = model
        self.tokens = tokens
        self.block_tables = tuple(block_tables)
        self.staging = staging
        self.sizes = sorted(sizes)
        largest = self.sizes[-1]
        self._inputs = torch.zeros(3 * largest, dtype=torch.int64, device=model.device)
        self._arange = torch.arange(largest + 1, device=model.device)
        self._starts = self._arange.to(torch.int32)
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, Decoded]] = {}
        self._pool: Any = None

    def run(self, rows: Decoding) -> Decoded:
        """One step of at most ``max(sizes)`` rows; the first ``len(rows)`` rows of the result are theirs, and valid
        until the next run."""
        count = len(rows)
        size = next(size for size in self.sizes if size >= count)
        host = np.empty((3, size), np.int64)
        host[:, :count] = rows.slots, rows.starts, rows.rope_lens
        host[:, count:] = _PADDING
        self._fill(host)
        if size not in self._graphs:
            return self.compute(size)
        graph, decoded = self._graphs[size]
        graph.replay()
        return decoded

    @torch.inference_mode()
    def compute(self, size: int) -> Decoded:
        """The step of the first ``size`` rows of the inputs, launch by launch."""
        slots, positions, rope_lens = self._inputs[: 3 * size].view(3, size)
        inputs = decode_inputs(slots, positions, self.tokens, self.block_tables, self.model.engine_config.block_size)
        batch = RaggedBatch(
            input_ids=inputs.input_ids,
            positions=positions,
            cu_seqlens_q=self._starts[: size + 1],
            seq_lens=inputs.seq_lens,
            slot_mapping=inputs.slot_mapping,
            block_tables=inputs.block_tables,
            logits_indices=self._arange[:size],
            rope_lens=torch.maximum(rope_lens, positions + 1),
            max_query_len=1,
            max_seq_len=self.tokens.shape[1] - 1,
        )
        logits = self.model.forward_local(batch)
        group, first = self.model.group, self.model.unembed.first
        return Decoded(logits, draw_greedy(logits, self.tokens, slots, positions + 1, group, first))

    def compute_padding(self, size: int) -> Decoded:
        """A step of ``size`` rows of padding, launch by launch: it touches no sequence."""
        self._fill(np.repeat(_PADDING, size, 1))
        return self.compute(size)

    @torch.inference_mode()
    def capture(self, report: Callable[[int], None] = lambda size: None) -> None:
        """Captures a graph for every size, the largest first, so that the others fit into its memory.

        Every rank of a group captures at the same time. ``report`` is told each size that is done.
        """
        stream = torch.cuda.Stream(self.model.device)
        self._pool = torch.cuda.graph_pool_handle()
        for size in reversed(self.sizes):
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                # Once launch by launch: what is compiled or set up at a first use must not be captured.
                self.compute_padding(size)
                stream.synchronize()
                graph = torch.cuda.CUDAGraph()
                # Other threads, NCCL's own among them, may talk to the GPU meanwhile.
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    decoded = self.compute(size)
                finally:
                    graph.capture_end()
                # The first launch sets the graph up on the device, which takes longer than a step.
                graph.replay()
            torch.cuda.current_stream().wait_stream(stream)
            self._graphs[size] = (graph, decoded)
            report(size)

    def _fill(self, host: np.ndarray[Any, Any]) -> None:
        self.staging.into(self._inputs[: host.size], host.ravel())

    def release(self) -> None:
        """Lets go of the graphs and what they compute with."""
        self._graphs.clear()
        self._pool = None
        self.tokens, self.block_tables = self.tokens[:0].clone(), ()
