"""Runner: one rank's half of a step. It keeps the tables that steps change, builds the batch and runs the forward.

Two tables live on the device, a row a slot: the tokens (prompts are written, drawn tokens are written back, input ids
are read from it, so that a step never waits for the host to learn the last one's tokens) and the blocks. All index
arithmetic is done for the whole batch at once.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from phalanx.distributed.group import GroupError
from phalanx.engine.decode import DecodeStep, Decoding, decode_sizes
from phalanx.engine.kv_storage import KVStorage
from phalanx.engine.pooling import Pooled, forward_pooled, with_pooled
from phalanx.engine.sampler import SampledRows, SamplerTable
from phalanx.engine.staging import Staging
from phalanx.engine.step import LOGITS_ALL, LOGITS_LAST, LOGITS_NONE, Masks, Row, Step
from phalanx.models.base import TransformerModel
from phalanx.ops.batch import RaggedBatch


@dataclass(frozen=True)
class StepResult:
    """What a launched step left on the device.

    Attributes:
        logits: float32 [R, vocab] of a step whose tokens were given, else None.
        sampled: of any other step, once its sampling is launched: waits for it and gives the drawn tokens and
            log-probabilities in the host's memory.
    """

    logits: Tensor | None
    sampled: Callable[[], SampledRows] | None


class Runner:
    """Runs steps of one model on one rank.

    Args:
        model: with its parameters in place.
        num_slots: sequences that can be known at once.
        max_len: tokens of a sequence, at most.
        sampling: whether tokens are drawn here; else each step is given its tokens and returns logits.
    """

    def __init__(self, model: TransformerModel, num_slots: int, max_len: int, sampling: bool) -> None:
        self.model = model
        self.block_size = model.engine_config.block_size
        self.device = model.device
        self.max_len = max_len
        self.staging = Staging(model.device)
        num_blocks = -(-max_len // self.block_size)
        # One column more than the longest sequence: where an unread token of a sequence at its end is written.
        # Not cleared: columns past a sequence's tokens are never used.
        columns = max_len + 1 if sampling else 0
        self.tokens = torch.empty(num_slots, columns, dtype=torch.int64, device=self.device)
        self.block_tables = [
            torch.zeros(num_slots, num_blocks, dtype=torch.int32, device=self.device) for _ in model.kv_groups
        ]
        self.samplers = SamplerTable(self.tokens, model.vocab_size, self.staging) if sampling else None
        self.storage: KVStorage | None = None
        self.decode: DecodeStep | None = None
        # What a masked step has left to sample: its logits, its rows, which of them each row of logits is of; and what
        # was pooled of its hidden states.
        self._unsampled: tuple[Tensor, list[Row], np.ndarray[Any, Any], Pooled | None] | None = None
        # The rows of the last step, if each added one token.
        self._decoding: Decoding | None = None

    def allocate_kv(self, num_blocks: int) -> None:
        """Makes the KV pool, the dummy block included."""
        self.storage = KVStorage(self.model.kv_groups, num_blocks, self.block_size, self.device)
        self.model.set_kv_cache(self.storage.layers(self.model.num_layers))

    def capture(self, max_num_seqs: int, report: Callable[[int, int], None]) -> None:
        """Makes CUDA graphs of decode steps up to ``max_num_seqs`` rows; ``report`` is told (done, all).

        The KV pool is there already, and stays where it is.
        """
        sizes = decode_sizes(max_num_seqs)
        self.decode = DecodeStep(self.model, self.tokens, self.block_tables, self.staging, sizes)
        done = itertools.count(1)
        self.decode.capture(lambda size: report(next(done), len(sizes)))

    def release(self) -> None:
        """Lets go of tables, KV and parameters: what still refers to the engine does not keep its memory."""
        if self.decode is not None:
            self.decode.release()
        self.storage = self.decode = self._unsampled = None
        self.tokens, self.block_tables = self.tokens[:0].clone(), []
        self.model.release()

    def launch(self, step: Step) -> StepResult:
        """One forward, and the sampling as a launch of its own behind it; ``sample`` launches that of a masked step."""
        decoding = self._decoding_of(step)
        self._apply(step, decoding)
        self._unsampled, self._decoding = None, decoding
        rows = step.rows
        if decoding is not None and self.samplers is not None and self.decode is not None:
            count = len(decoding)
            if count <= self.decode.sizes[-1]:
                decoded = self.decode.run(decoding)
                if self.samplers.all_greedy(decoding.slots.tolist()):
                    return self._sampled(SampledRows(list(range(count)), decoded.tokens[:count], None, None))
                logits = self.model.unembed.gather(decoded.logits[:count])
                return self._sample(self.samplers, step, rows or decoding.rows(), logits, np.arange(count), None)
        if decoding is not None and not rows:
            rows = decoding.rows()
        batch, logit_rows = self.build_batch(rows, step.given)
        if any(row.pool for row in rows):
            logits, pooled = forward_pooled(self.model, batch, rows, self.staging)
        else:
            logits, pooled = self.model.forward(batch), None
        if self.samplers is None or step.given is not None:
            return StepResult(logits, None)
        return self._sample(self.samplers, step, rows, logits, logit_rows, pooled)

    def _decoding_of(self, step: Step) -> Decoding | None:
        if step.further is None:
            return Decoding.of(step.rows) if step.given is None else None
        if self._decoding is None:
            raise RuntimeError("a step goes on with the rows of one that was no decode step")
        return self._decoding.further()

    def sample(self, masks: Masks) -> StepResult:
        """The sampling of the masked step that was launched last."""
        if self.samplers is None or self._unsampled is None:
            raise RuntimeError("masks came for a step that does not wait for any")
        (logits, rows, owner, pooled), self._unsampled = self._unsampled, None
        return self._sampled(with_pooled(self.samplers.sample(logits, rows, owner, masks), pooled))

    def _sample(
        self,
        samplers: SamplerTable,
        step: Step,
        rows: list[Row],
        logits: Tensor,
        owner: np.ndarray[Any, Any],
        pooled: Pooled | None,
    ) -> StepResult:
        if step.masked:
            self._unsampled = logits, rows, owner, pooled
            return StepResult(None, None)
        return self._sampled(with_pooled(samplers.sample(logits, rows, owner), pooled))

    def _sampled(self, rows: SampledRows) -> StepResult:
        fault = self.model.group.fault_flag
        on_their_way = self.staging.down([*rows.tensors(), *([] if fault is None else [fault])])

        def read() -> SampledRows:
            found = on_their_way.wait()
            if fault is not None and bool(found.pop().any()):
                raise GroupError("an all-reduce over shared memory waited in vain for another rank: its sums are wrong")
            return rows.with_tensors(found)

        return StepResult(None, read)

    def build_batch(self, rows: list[Row], given: list[int] | None) -> tuple[RaggedBatch, np.ndarray[Any, Any]]:
        """The batch of these rows, and for each row of logits the index of the ``rows`` entry that it belongs to.

        Input ids are ``given``, or else read from the token table.
        """
        slots, starts, counts, wanted, rope_lens = (
            np.fromiter((getattr(row, name) for row in rows), np.int64, len(rows))
            for name in ("slot", "start", "count", "logits", "rope_len")
        )
        ends = np.cumsum(counts)
        owner = np.repeat(np.arange(len(rows)), counts)
        positions = np.arange(int(ends[-1]), dtype=np.int64) - (ends - counts)[owner] + starts[owner]
        is_last = np.zeros(len(owner), dtype=bool)
        is_last[ends - 1] = True
        with_logits = np.flatnonzero((wanted[owner] == LOGITS_ALL) | (is_last & (wanted[owner] != LOGITS_NONE)))
        seq_lens = starts + counts
        max_seq_len = int(seq_lens.max())
        num_columns = -(-max_seq_len // self.block_size)

        slot_index, token_slots, token_positions, cu_seqlens, lengths, rope, logits_indices, *ids = self.staging.up(
            slots,
            slots[owner],
            positions,
            np.concatenate(([0], ends)).astype(np.int32),
            seq_lens.astype(np.int32),
            np.maximum(rope_lens[owner], positions + 1),
            with_logits,
            *([] if given is None else [np.array(given, np.int64)]),
        )
        columns = token_positions // self.block_size
        offsets = token_positions % self.block_size
        batch = RaggedBatch(
            input_ids=ids[0] if ids else self.tokens[token_slots, token_positions],
            positions=token_positions,
            cu_seqlens_q=cu_seqlens,
            seq_lens=lengths,
            slot_mapping=tuple(
                table[token_slots, columns].long() * self.block_size + offsets for table in self.block_tables
            ),
            block_tables=tuple(table[slot_index, :num_columns] for table in self.block_tables),
            logits_indices=logits_indices,
            rope_lens=rope,
            max_query_len=int(counts.max()),
            max_seq_len=max_seq_len,
        )
        return batch, owner[with_logits]

    def profile(self, num_tokens: int, num_seqs: int, num_layers: int = 1) -> None:
        """One forward and sampling at the limits, on the dummy block: what follows never needs more memory.

        Layers follow one another in the same memory, so one stands for all; the sampler sees the longest histories.
        """
        each = min(max(num_tokens // num_seqs, 1), self.max_len)
        rest = min(num_tokens - each * (num_seqs - 1), self.max_len)
        counts = [each] * (num_seqs - 1) + [rest]
        self.tokens[:, : max(counts)] = 0
        rows = [Row(slot, 0, count, LOGITS_LAST, True, 0, 0, []) for slot, count in enumerate(counts)]
        batch, logit_rows = self.build_batch(rows, [0] * sum(counts))
        logits = self.model.forward(batch, layers=range(min(num_layers, self.model.num_layers)))
        if self.samplers is not None:
            words = -(-self.model.vocab_size // 32)
            masks = Masks(list(range(num_seqs)), b"\xff" * (4 * words * num_seqs))
            self.samplers.sample(logits, rows, logit_rows, masks, worst_case=True)

    def profile_decode(self, num_seqs: int) -> None:
        """A decode step of padding at its limit."""
        decode_step = DecodeStep(self.model, self.tokens, self.block_tables, self.staging, [num_seqs])
        decode_step.compute_padding(num_seqs)

    def _apply(self, step: Step, decoding: Decoding | None) -> None:
        """Brings the tables up to date."""
        if self.samplers is not None:
            for slot, sampler in step.samplers:
                self.samplers.set(slot, sampler)
        if step.writes:
            self._scatter(self.tokens, [(w.slot, w.start, w.tokens) for w in step.writes])
        new = [(row.slot, row.first_block, row.blocks) for row in step.rows if row.blocks]
        if step.further and decoding is not None:
            new = [(int(decoding.slots[each.index]), each.first_block, each.blocks) for each in step.further]
        if new:
            for group, table in enumerate(self.block_tables):
                self._scatter(table, [(slot, first, blocks[group]) for slot, first, blocks in new])

    def _scatter(self, table: Tensor, changes: list[tuple[int, int, list[int]]]) -> None:
        """Writes runs of values into rows of a table: (row, first column, values) each."""
        counts = np.fromiter((len(values) for _, _, values in changes), np.int64, len(changes))
        total = int(counts.sum())
        values = np.fromiter(itertools.chain.from_iterable(values for _, _, values in changes), np.int64, total)
        rows = np.repeat(np.fromiter((row for row, _, _ in changes), np.int64, len(changes)), counts)
        firsts = np.fromiter((first for _, first, _ in changes), np.int64, len(changes))
        begins = np.cumsum(counts) - counts
        columns = np.arange(total) + np.repeat(firsts - begins, counts)
        there = self.staging.up(rows, columns, values)
        table[there[0], there[1]] = there[2].to(table.dtype)
