"""Sequence: one stream of tokens with the KV blocks that hold it; and the request that it answers."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from phalanx.engine.prefix_cache import Entry
from phalanx.engine.sampling_params import SamplingParams


class Status(enum.Enum):
    """Where a sequence is in its life."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(eq=False)
class Sequence:
    """Tokens known so far, how many of them have KV, and the blocks that it lies in.

    Attributes:
        prompt_len: leading tokens that were given, the rest was generated.
        num_computed: tokens whose KV is written by a step launched so far.
        num_committed: tokens whose KV is written by a step that has ended.
        pending: tokens that launched steps draw and the host has not read.
        blocks: block ids a KV group; the dummy block where one was freed.
        entries: the prefix-index entries of the leading full blocks, a KV group.
        slot: row of the runner's tables, -1 while it has none.
        last_step: the last launched step that names its blocks.
    """

    seq_id: int
    tokens: list[int]
    prompt_len: int
    blocks: list[list[int]]
    root: str = ""
    num_computed: int = 0
    num_committed: int = 0
    pending: int = 0
    entries: list[list[Entry]] = field(default_factory=list)
    slot: int = -1
    last_step: int = -1
    status: Status = Status.WAITING

    @property
    def num_tokens(self) -> int:
        """All its tokens, those drawn but unread included."""
        return len(self.tokens) + self.pending

    @property
    def seen_tokens(self) -> int:
        return self.num_computed

    @property
    def num_blocks(self) -> int:
        """Blocks in each KV group."""
        return len(self.blocks[0])

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.prompt_len


_arrivals = count()


@dataclass(eq=False)
class Request(Sequence):
    """A Sequence that the scheduler runs: one answer to one prompt.

    Attributes:
        request_id: the caller's name for it.
        params: how it is sampled; ``max_tokens`` is a number here.
        index: which of the ``n`` answers.
        stop_ids: token ids that end it.
        bad_words: token runs that must not come.
        guide: the GuideMatcher of its tokens so far, where it has to look like something.
        pooling: "last" or "mean" for the prompt's embedding, "" for an answer.
        state: its hidden states pooled so far, float32 [hidden], not yet of length 1.
        parent: the request whose prompt it shares (n > 1) and waits for.
        arrival: order of arrival, kept through preemption.
        sent_blocks: blocks a KV group that the runners know of; -1 before they know the request at all.
        started_at: when it first got a place in a step, of ``time.monotonic``; 0 before.
        finish_reason: "stop", "length", "abort" or "error" once it is finished.
    """

    request_id: str = ""
    params: SamplingParams = field(default_factory=SamplingParams)
    max_tokens: int = 0
    index: int = 0
    seed: int = 0
    stop_ids: frozenset[int] = frozenset()
    bad_words: tuple[tuple[int, ...], ...] = ()
    guide: Any = None
    parent: Request | None = None
    arrival: int = field(default_factory=lambda: next(_arrivals))
    finish_reason: str | None = None
    error: str | None = None
    stop_reason: int | str | None = None
    logprobs: list[dict[int, float | None]] = field(default_factory=list)
    prompt_logprobs: list[dict[int, float | None] | None] = field(default_factory=list)
    text: Any = None
    pooling: str = ""
    state: Any = None
    cached_tokens: int = 0
    started_at: float = 0.0
    sent_blocks: int = -1
    preemptions: int = 0

    @property
    def needs_whole_prompt(self) -> bool:
        """Whether every token of the prompt must be computed for it, cached or not."""
        return self.params.prompt_logprobs is not None or self.pooling == "mean"

    @property
    def at_limit(self) -> bool:
        """Whether the tokens drawn so far, unread ones included, are all that it may have."""
        return self.num_tokens - self.prompt_len >= self.max_tokens

    def push_text(self, token: int) -> str | None:
        """Feeds its text, where it has one that is read as it comes; the stop text that the token completes."""
        return self.text.push(token) if self.text is not None else None

    @property
    def is_running(self) -> bool:
        return self.status is Status.RUNNING

    @property
    def is_finished(self) -> bool:
        return self.status is Status.FINISHED
