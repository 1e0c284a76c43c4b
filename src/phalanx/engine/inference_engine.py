"""InferenceEngine: one atomic forward over a ragged batch, for users with a scheduler of their own."""

from __future__ import annotations

import enum
import itertools
import operator
from collections.abc import Iterable
from collections.abc import Sequence as Many
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from phalanx.config import EngineConfig
from phalanx.distributed.group import GroupError
from phalanx.engine.executor import Executor
from phalanx.engine.kv_manager import KVManager
from phalanx.engine.memory import size_pool
from phalanx.engine.progress import progress
from phalanx.engine.ranks import Team
from phalanx.engine.runner import Runner
from phalanx.engine.sequence import Sequence
from phalanx.engine.step import LOGITS_ALL, LOGITS_LAST, Row, Serialize, Step
from phalanx.models.base import TransformerModel


class SchedulingResult(enum.Enum):
    """Whether a ``put`` can run, and if not, the first limit that it would break."""

    Success = 0
    EngineSequenceLimitExceeded = 1
    """More sequences than ``max_tracked_sequences``."""
    BatchSequenceLimitExceeded = 2
    """More sequences in one batch than ``max_num_seqs``."""
    BatchTokenLimitExceeded = 3
    """More tokens in one batch than ``max_num_batched_tokens``."""
    KVCacheLimitExceeded = 4
    """More KV blocks than are free."""
    SequenceTokenLimitExceeded = 5
    """A sequence would grow past ``max_model_len``."""


def sizes_to_warm(token_budget: int) -> list[int]:
    """Tokens of steps that are run at the start, besides the largest.

    Kernels differ by the number of tokens: products of few rows up to 64, and sums over ranks whenever it doubles.
    """
    return [1, *(2**power for power in range(3, (token_budget - 1).bit_length()))]


class SchedulingError(RuntimeError):
    """A ``put`` that cannot run; nothing was changed.

    Attributes:
        result: the SchedulingResult that says why.
    """

    def __init__(self, result: SchedulingResult, detail: str) -> None:
        super().__init__(f"{result.name}: {detail}")
        self.result = result


class InferenceEngine:
    """A model with its KV pool. ``build_engine`` makes one; ``LLM`` is the scheduler on top of one.

    Under a tensor-parallel group that the user started (torchrun), every rank makes the same calls and all get the same
    results.

    Args:
        model: with its parameters in place.
        team: its tensor-parallel group, and the ranks that were started for it.
        policy_name: the policy that built it, for ``serialize``.
        scheduled: a scheduler owns the sequences and samples on the device (LLM); ``put`` is not for use then.
    """

    def __init__(self, model: TransformerModel, team: Team, policy_name: str, scheduled: bool = False) -> None:
        self.model = model
        self.team = team
        self.group = group = team.group
        self.policy_name = policy_name
        config = model.engine_config
        self.token_budget = token_budget(config, model.device)
        self.max_num_seqs = min(sequence_budget(config, model.device), self.token_budget)
        wanted = config.max_model_len or model.max_sequence_length
        self.max_model_len = check_length(wanted, model)
        self.scheduled = scheduled
        self.max_tracked_sequences = self.max_num_seqs if scheduled else config.max_tracked_sequences
        self.runner = Runner(model, self.max_tracked_sequences, self.max_model_len, scheduled)
        self.num_blocks = size_pool(self.runner, self.token_budget, self.max_num_seqs, group)
        self.runner.allocate_kv(self.num_blocks)
        if model.device.type == "cuda":
            self._warm_up()
        rope = model.rope
        regime = rope.regime if rope is not None and rope.length_dependent else None
        self.kv = KVManager(model, self.num_blocks, config.prefix_cache, regime)
        # The longest sequence is one that the pool holds alone: that is what keeps admission live.
        self.max_model_len = min(self.max_model_len, self.kv.capacity)
        leading = group.rank == 0 and (scheduled or not team.spmd)
        self.executor = Executor(self.runner, group, leading, team.spmd)
        self.closed = False
        self._sequences: dict[int, Sequence] = {}
        self._slots = list(range(self.max_tracked_sequences - 1, -1, -1))
        self._step_id = 0

    # -- asking

    @property
    def free_blocks(self) -> int:
        """KV blocks that a sequence could get now."""
        return self.kv.free_blocks

    @property
    def tracked_sequences(self) -> tuple[int, ...]:
        """uids with KV."""
        return tuple(self._sequences)

    def query(self, uid: int, max_tokens: int, max_blocks: int) -> tuple[int, int]:
        """(tokens, blocks) that ``uid`` could add at most, within both limits; (0, 0) if it cannot be tracked."""
        if max_tokens < 0 or max_blocks < 0:
            raise ValueError(f"query({uid}, {max_tokens}, {max_blocks}): the limits must not be negative")
        sequence = self._sequences.get(uid)
        if sequence is None:
            if not self._slots:
                return 0, 0
            sequence = self._new_sequence(uid)
        room = max(self.max_model_len - sequence.seen_tokens, 0)
        return self.model.get_kv_requirements(sequence, min(max_tokens, room), max_blocks)

    def can_schedule(self, uids: Iterable[int], lengths: Iterable[int]) -> SchedulingResult:
        """Whether a ``put`` of these uids with these numbers of tokens can run."""
        return self._judge(list(uids), list(lengths))[0]

    def get_remaining_block_capacity(self, uid: int) -> int:
        """Tokens that fit into the blocks which ``uid`` has already; 0 for an unknown one."""
        sequence = self._sequences.get(uid)
        return 0 if sequence is None else self.model.get_remaining_block_capacity(sequence)

    # -- doing

    def put(
        self,
        uids: Iterable[int],
        tokens: Iterable[Many[int] | Tensor],
        logits: Literal["last", "all"] = "last",
    ) -> Tensor:
        """One forward: appends each sequence's tokens to what it has seen.

        Args:
            uids: one a sequence, each once; an unknown one starts a sequence.
            tokens: token ids a sequence, at least one.
            logits: of the "last" token of each, or of "all".

        Returns:
            float32 [sequences, vocab_size], or [all tokens, vocab_size], in the order given; the caller's own.

        Raises:
            SchedulingError: a limit would be broken. ValueError: bad input. Nothing is changed then.
            RuntimeError: the engine was closed.
        """
        self.check_open()
        if self.scheduled:
            raise RuntimeError("the sequences of this engine belong to an LLM: build one of your own with build_engine")
        names, texts = list(uids), [_as_ids(ids) for ids in tokens]
        self._check_input(names, texts, logits)
        result, detail = self._judge(names, [len(ids) for ids in texts])
        if result is not SchedulingResult.Success:
            raise SchedulingError(result, detail)
        started: list[int] = []
        try:
            wanted = LOGITS_ALL if logits == "all" else LOGITS_LAST
            rows = [self._row(uid, len(ids), wanted, started) for uid, ids in zip(names, texts, strict=True)]
            given = list(itertools.chain.from_iterable(texts))
            out = self.executor.launch(Step(self._step_id, rows, [], [], given))
        except BaseException:
            self._roll_back(names, started)
            raise
        self._step_id += 1
        for uid, ids in zip(names, texts, strict=True):
            self._sequences[uid].num_computed += len(ids)
        if out.logits is None:
            raise RuntimeError("the forward returned no logits")
        return out.logits

    def flush(self, uid: int) -> None:
        """Forgets a sequence and frees its blocks.

        Raises:
            ValueError: an unknown uid.
        """
        sequence = self._sequences.pop(uid, None)
        if sequence is None:
            raise ValueError(f"flush of uid {uid}, which is not tracked")
        self._slots.append(sequence.slot)
        self.kv.free(sequence)

    def serialize(self, folder: str | Path) -> None:
        """Writes the parameters of every rank into ``folder``, which ``build_engine`` reads without transforming."""
        self.check_open()
        self.executor.serialize(Serialize(str(Path(folder).absolute()), self.policy_name))

    def close(self) -> None:
        """Ends the engine and the ranks that it started, and lets its memory go. Closing twice is fine."""
        if self.closed:
            return
        self.closed = True
        self.executor.close()
        self.team.close()

    def check_open(self) -> None:
        """Raises RuntimeError if the engine was closed."""
        if self.closed:
            raise RuntimeError("this engine is closed: build another one")

    def __enter__(self) -> InferenceEngine:
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()

    # -- inside

    def _warm_up(self) -> None:
        """Everything that is compiled or set up at a first use, and the graphs: no request waits for it later."""
        self.runner.profile(self.token_budget, self.max_num_seqs, self.model.num_layers)
        for tokens in sizes_to_warm(self.token_budget):
            sequences = -(-tokens // self.max_model_len)
            if sequences <= self.max_num_seqs:
                self.runner.profile(tokens, sequences)
        if self.scheduled and self.model.engine_config.cuda_graphs and self.group.capturable:
            with progress("capturing CUDA graphs", shown=self.group.rank == 0) as report:
                self.runner.capture(self.max_num_seqs, report)
        torch.cuda.synchronize(self.model.device)
        fault = self.group.fault_flag
        if fault is not None and bool(fault.any()):
            raise GroupError("a rank waited in vain for another one while the engine was warmed up")

    def _new_sequence(self, uid: int) -> Sequence:
        return Sequence(uid, [], 0, self.kv.new_blocks())

    def _judge(self, uids: list[int], lengths: list[int]) -> tuple[SchedulingResult, str]:
        if any(length < 1 for length in lengths):
            raise ValueError(f"lengths must be at least 1, given {lengths}")
        if len(uids) > self.max_num_seqs:
            return SchedulingResult.BatchSequenceLimitExceeded, f"{len(uids)} sequences, limit {self.max_num_seqs}"
        fresh = sum(uid not in self._sequences for uid in uids)
        if fresh > len(self._slots):
            tracked = f"{len(self._sequences)} tracked and {fresh} new sequences, limit {self.max_tracked_sequences}"
            return SchedulingResult.EngineSequenceLimitExceeded, tracked
        if sum(lengths) > self.token_budget:
            return SchedulingResult.BatchTokenLimitExceeded, f"{sum(lengths)} tokens, limit {self.token_budget}"
        free = self.kv.free_blocks
        for uid, length in zip(uids, lengths, strict=True):
            sequence = self._sequences.get(uid) or self._new_sequence(uid)
            total = sequence.seen_tokens + length
            if total > self.max_model_len:
                detail = f"uid {uid} would have {total} tokens, limit {self.max_model_len}"
                return SchedulingResult.SequenceTokenLimitExceeded, detail
            tokens, blocks = self.model.get_kv_requirements(sequence, length, free)
            if tokens < length:
                return (
                    SchedulingResult.KVCacheLimitExceeded,
                    f"uid {uid} needs more blocks than the {free} that are left",
                )
            free -= blocks
        return SchedulingResult.Success, ""

    def _check_input(self, uids: list[int], texts: list[list[int]], logits: str) -> None:
        if logits not in ("last", "all"):
            raise ValueError(f"logits={logits!r}: expected 'last' or 'all'")
        if len(uids) != len(texts):
            raise ValueError(f"{len(uids)} uids and {len(texts)} token lists: give one list a uid")
        if not uids:
            raise ValueError("put of no sequences: give one uid at least")
        if len(set(uids)) != len(uids):
            raise ValueError(f"put names a uid twice: {uids}")
        for uid, ids in zip(uids, texts, strict=True):
            check_ids(ids, self.model.vocab_size, f"uid {uid}")

    def _row(self, uid: int, count: int, wanted: int, started: list[int]) -> Row:
        """A sequence's part of a step, with the blocks that it needs; a new one is added to ``started``."""
        sequence = self._sequences.get(uid)
        if sequence is None:
            sequence = self._new_sequence(uid)
            sequence.slot = self._slots.pop()
            self._sequences[uid] = sequence
            started.append(uid)
        first = sequence.num_blocks
        if not self.kv.allocate(sequence, count):
            detail = f"uid {uid}: the model's maybe_allocate_kv gave no blocks for {count} tokens"
            raise SchedulingError(SchedulingResult.KVCacheLimitExceeded, detail)
        new = [blocks[first:] for blocks in sequence.blocks] if sequence.num_blocks > first else []
        seen = sequence.num_computed
        return Row(sequence.slot, seen, count, wanted, False, seen + count, first, new)

    def _roll_back(self, uids: list[int], started: list[int]) -> None:
        for uid in started:
            self.flush(uid)
        for uid in set(uids) & set(self._sequences):
            sequence = self._sequences[uid]
            keep = -(-sequence.num_computed // self.kv.block_size)
            for blocks in sequence.blocks:
                self.kv.pool.release(reversed(blocks[keep:]))
                del blocks[keep:]


def _as_ids(ids: Many[int] | Tensor) -> list[int]:
    if isinstance(ids, Tensor):
        if ids.dim() != 1 or ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
            raise ValueError(f"token ids must be a 1-D tensor of integers, given {ids.dtype} {tuple(ids.shape)}")
        return [int(value) for value in ids.tolist()]
    return [as_id(value) for value in ids]


def as_id(value: Any) -> Any:
    """An integer of any library as a plain one; anything else, bools included, as it is."""
    return operator.index(value) if hasattr(value, "__index__") and not isinstance(value, bool) else value


def check_ids(ids: Many[int], vocab_size: int, whose: str) -> None:
    """Raises ValueError for no ids at all and for ids outside the vocabulary."""
    if not len(ids):
        raise ValueError(f"{whose}: no tokens; at least one is needed")
    for value in ids:
        if not isinstance(value, int) or isinstance(value, bool):
            raise ValueError(f"{whose}: token ids must be integers, given {value!r}")
    if min(ids) < 0 or max(ids) >= vocab_size:
        wrong = next(value for value in ids if not 0 <= value < vocab_size)
        raise ValueError(f"{whose}: token id {wrong} is outside the vocabulary of {vocab_size}")


def token_budget(config: EngineConfig, device: torch.device) -> int:
    """Tokens of a step."""
    return config.max_num_batched_tokens or (512 if device.type == "cpu" else 8192)


def sequence_budget(config: EngineConfig, device: torch.device) -> int:
    """Sequences of a step."""
    return config.max_num_seqs or (64 if device.type == "cpu" else 256)


def check_length(wanted: int, model: TransformerModel) -> int:
    """The longest sequence that is allowed: rope goes on past the trained length, learned positions do not."""
    if wanted > model.max_sequence_length and model.rope is None:
        raise ValueError(f"max_model_len={wanted} is above the model's {model.max_sequence_length} learned positions")
    return wanted
