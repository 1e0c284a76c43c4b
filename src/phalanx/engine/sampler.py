"""SamplerTable: each slot's sampling settings, and from them the tensors that one step's sampling needs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from phalanx.engine.staging import Staging
from phalanx.engine.step import LOGITS_ALL, Masks, Row, Sampler
from phalanx.ops.sampling import BadWords, Draw, Penalties, adjust_logits, sample, top_logprobs, uniforms
from phalanx.ops.token_mask import mask_tokens


@dataclass(frozen=True)
class RowLogprobs:
    """Log-probabilities of L rows of logits: which ``rows`` entry and position each belongs to (host), the chosen
    token's [L], and the likeliest [L, K] with ids."""

    owner: list[int]
    positions: list[int]
    counts: list[int]
    chosen_ids: Tensor
    chosen: Tensor
    top_ids: Tensor
    top: Tensor


@dataclass(frozen=True)
class SampledRows:
    """Of one step: on the device, or copied to the host.

    Attributes:
        owner: index of the ``rows`` entry that each drawn token belongs to.
        tokens: int64 [len(owner)], -1 where the logits were not finite.
        logprobs, prompt_logprobs: where some row wants them.
        pooled: float32 [len(pooled_owner), hidden], the hidden states of rows that want some.
    """

    owner: list[int]
    tokens: Tensor
    logprobs: RowLogprobs | None
    prompt_logprobs: RowLogprobs | None
    pooled: Tensor | None = None
    pooled_owner: Sequence[int] = ()

    def tensors(self) -> list[Tensor]:
        """All its tensors, in the order that ``with_tensors`` takes."""
        parts = [part for part in (self.logprobs, self.prompt_logprobs) if part is not None]
        pooled = [] if self.pooled is None else [self.pooled]
        return [self.tokens, *(getattr(part, name) for part in parts for name in _LOGPROB_TENSORS), *pooled]

    def with_tensors(self, tensors: list[Tensor]) -> SampledRows:
        """The same with other tensors in their places."""
        rest = iter(tensors[1:])

        def moved(part: RowLogprobs | None) -> RowLogprobs | None:
            if part is None:
                return None
            moves: dict[str, Any] = {name: next(rest) for name in _LOGPROB_TENSORS}
            return replace(part, **moves)

        logprobs, prompt_logprobs = moved(self.logprobs), moved(self.prompt_logprobs)
        pooled = None if self.pooled is None else next(rest)
        return SampledRows(self.owner, tensors[0], logprobs, prompt_logprobs, pooled, self.pooled_owner)


_LOGPROB_TENSORS = ("chosen_ids", "chosen", "top_ids", "top")


class SamplerTable:
    """Settings by slot; ``sample`` turns a step's logits into tokens and writes them into the token table.

    Args:
        tokens: the runner's token table, int64 [slots, columns].
        vocab_size: logits of a row.
        staging: of the table's device.
    """

    def __init__(self, tokens: Tensor, vocab_size: int, staging: Staging) -> None:
        self.tokens = tokens
        self.vocab_size = vocab_size
        self.staging = staging
        self._slots: dict[int, Sampler] = {}
        self._not_greedy: set[int] = set()

    def set(self, slot: int, sampler: Sampler) -> None:
        """Settings of the sequence that is in the slot now."""
        self._slots[slot] = sampler
        if is_greedy(sampler):
            self._not_greedy.discard(slot)
        else:
            self._not_greedy.add(slot)

    def all_greedy(self, slots: Iterable[int]) -> bool:
        """Whether each of these slots takes the likeliest token, and nothing else is wanted of its logits."""
        return not self._not_greedy or self._not_greedy.isdisjoint(slots)

    def sample(
        self,
        logits: Tensor,
        rows: list[Row],
        owner: np.ndarray[Any, Any],
        masks: Masks | None = None,
        worst_case: bool = False,
    ) -> SampledRows:
        """Draws a token for the last position of each row that says so.

        Args:
            logits: float32 [R, vocab].
            rows: the step's rows.
            owner: for each of the R, its entry in ``rows``.
            masks: what some of the rows may draw.
            worst_case: every row uses every feature (to measure memory); settings need not be there.
        """
        draws = np.fromiter((row.draw for row in rows), bool, len(rows))
        last = np.flatnonzero((np.diff(owner, append=-1) != 0) & draws[owner])
        drawing = [rows[index] for index in owner[last]]
        settings = [_EVERYTHING if worst_case else self._slots[row.slot] for row in drawing]
        ends = np.fromiter((row.start + row.count for row in drawing), np.int64, len(drawing))
        slots = np.fromiter((row.slot for row in drawing), np.int64, len(drawing))
        raw = logits if len(last) == len(owner) else logits[self._upload(last)]
        adjusted = adjust_logits(
            raw,
            self._penalties(settings, slots, ends, worst_case),
            self._bias(settings, ends),
            self._bad_words(settings, slots, ends),
        )
        if masks is not None and masks.rows:
            bits = np.frombuffer(masks.bits, np.int32).reshape(len(masks.rows), -1).copy()
            lines = np.searchsorted(owner[last], masks.rows)
            # In place unless these are the raw logits, which log-probabilities are of.
            adjusted = mask_tokens(adjusted.clone() if adjusted is raw else adjusted, *self.staging.up(lines, bits))
        tokens = sample(adjusted, self._draw(settings, ends))
        self.tokens[self._upload(slots), self._upload(ends)] = tokens.clamp_min(0)
        owners = owner[last].tolist()
        return SampledRows(
            owners,
            tokens,
            self._logprobs(settings, owners, ends, raw, tokens),
            self._prompt_logprobs(rows, owner, logits, worst_case),
        )

    # -- what only some rows want; None where none does

    def _penalties(
        self, settings: list[Sampler], slots: np.ndarray, ends: np.ndarray, worst_case: bool
    ) -> Penalties | None:
        wanting = [
            i
            for i, s in enumerate(settings)
            if s.repetition_penalty != 1 or s.presence_penalty != 0 or s.frequency_penalty != 0
        ]
        if not wanting:
            return None
        chosen = [settings[i] for i in wanting]
        longest = self.tokens.shape[1] if worst_case else int(ends[wanting].max())
        return Penalties(
            rows=self._upload(np.array(wanting)),
            history=self.tokens[self._upload(slots[wanting]), :longest],
            lengths=self._upload(ends[wanting]),
            prompt_lens=self._upload(np.array([s.prompt_len for s in chosen])),
            repetition=self._floats([s.repetition_penalty for s in chosen]),
            presence=self._floats([s.presence_penalty for s in chosen]),
            frequency=self._floats([s.frequency_penalty for s in chosen]),
        )

    def _bias(self, settings: list[Sampler], ends: np.ndarray) -> tuple[Tensor, Tensor, Tensor] | None:
        entries = [(i, token, value) for i, s in enumerate(settings) for token, value in s.bias]
        entries += [
            (i, token, float("-inf"))
            for i, s in enumerate(settings)
            if ends[i] - s.prompt_len < s.min_tokens
            for token in s.end_ids
        ]
        if not entries:
            return None
        rows, tokens, values = zip(*entries, strict=True)
        return self._upload(np.array(rows)), self._upload(np.array(tokens)), self._floats(values)

    def _bad_words(self, settings: list[Sampler], slots: np.ndarray, ends: np.ndarray) -> BadWords | None:
        entries = [(i, word) for i, s in enumerate(settings) for word in s.bad_words]
        if not entries:
            return None
        width = max(len(word) for _, word in entries) - 1
        rows = np.array([i for i, _ in entries])
        prefixes = np.full((len(entries), width), -1, dtype=np.int64)
        for line, (_, word) in enumerate(entries):
            prefixes[line, width - len(word) + 1 :] = word[:-1]
        columns = ends[rows][:, None] - width + np.arange(width)
        recent = self.tokens[self._upload(slots[rows])[:, None], self._upload(np.maximum(columns, 0))]
        return BadWords(
            rows=self._upload(rows),
            prefixes=self._upload(prefixes),
            recent=torch.where(self._upload(columns) >= 0, recent, -2),
            last=self._upload(np.array([word[-1] for _, word in entries])),
        )

    def _draw(self, settings: list[Sampler], ends: np.ndarray) -> Draw | None:
        drawing = [i for i, s in enumerate(settings) if s.temperature > 0]
        if not drawing:
            return None
        chosen = [settings[i] for i in drawing]
        seeds = np.array([s.seed for s in chosen], dtype=np.uint64)
        return Draw(
            rows=self._upload(np.array(drawing)),
            temperature=self._floats([s.temperature for s in chosen]),
            top_k=self._upload(np.array([min(s.top_k, self.vocab_size) for s in chosen])),
            top_p=self._floats([s.top_p for s in chosen]),
            min_p=self._floats([s.min_p for s in chosen]),
            uniform=self._upload(uniforms(seeds, ends[drawing])),
            filtered=any(s.top_k > 0 or s.top_p < 1 or s.min_p > 0 for s in chosen),
        )

    def _logprobs(
        self, settings: list[Sampler], owners: list[int], ends: np.ndarray, raw: Tensor, tokens: Tensor
    ) -> RowLogprobs | None:
        wanting = [i for i, s in enumerate(settings) if s.logprobs >= 0]
        if not wanting:
            return None
        index = self._upload(np.array(wanting))
        counts = [settings[i].logprobs for i in wanting]
        chosen, ids, values = top_logprobs(raw[index], tokens[index], max(counts))
        positions = [int(ends[i]) for i in wanting]
        return RowLogprobs([owners[i] for i in wanting], positions, counts, tokens[index], chosen, ids, values)

    def _prompt_logprobs(
        self, rows: list[Row], owner: np.ndarray, logits: Tensor, worst_case: bool
    ) -> RowLogprobs | None:
        wanted = [i for i, row in enumerate(rows) if row.logits == LOGITS_ALL and not worst_case]
        if not wanted:
            return None
        lines = np.flatnonzero(np.isin(owner, wanted))
        owners = owner[lines]
        firsts = np.searchsorted(owner, owners)
        positions = np.array([rows[i].start for i in owners]) + (lines - firsts) + 1
        inside = positions < np.array([self._slots[rows[i].slot].prompt_len for i in owners])
        lines, owners, positions = lines[inside], owners[inside], positions[inside]
        if not len(lines):
            return None
        slots = np.array([rows[i].slot for i in owners])
        following = self.tokens[self._upload(slots), self._upload(positions)]
        counts = [self._slots[slot].prompt_logprobs for slot in slots.tolist()]
        chosen, ids, values = top_logprobs(logits[self._upload(lines)], following, max(counts))
        return RowLogprobs(owners.tolist(), positions.tolist(), counts, following, chosen, ids, values)

    def _upload(self, array: np.ndarray[Any, Any]) -> Tensor:
        return self.staging.up(array)[0]

    def _floats(self, values: Any) -> Tensor:
        return self._upload(np.asarray(values, dtype=np.float32))


def is_greedy(sampler: Sampler) -> bool:
    """Whether the likeliest token is all that these settings want of logits."""
    return (
        sampler.temperature == 0
        and sampler.repetition_penalty == 1
        and sampler.presence_penalty == 0
        and sampler.frequency_penalty == 0
        and not sampler.bias
        and not sampler.bad_words
        and sampler.min_tokens == 0
        and sampler.logprobs < 0
        and sampler.prompt_logprobs < 0
        and not sampler.guided
    )


_EVERYTHING = Sampler(
    temperature=1.0,
    top_k=1,
    top_p=0.5,
    min_p=0.1,
    repetition_penalty=1.1,
    presence_penalty=0.1,
    frequency_penalty=0.1,
    seed=0,
    prompt_len=0,
    bias=[(0, 1.0)],
    bad_words=[[0, 0]],
    min_tokens=2,
    end_ids=[0],
    logprobs=1,
    prompt_logprobs=-1,
    guided=True,
)
