"""put / query / can_schedule / flush: every result, atomic, and enough to build a scheduler on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from phalanx import LLM, build_engine
from phalanx.engine import InferenceEngine, SchedulingError, SchedulingResult
from tests.tiny_tokenizer import VOCAB_SIZE


@pytest.fixture
def engine(tiny_folder: Path) -> InferenceEngine:
    return build_engine(
        tiny_folder,
        num_blocks=11,
        block_size=4,
        max_num_batched_tokens=16,
        max_num_seqs=3,
        max_tracked_sequences=4,
        max_model_len=24,
    )


def test_every_scheduling_result(engine: InferenceEngine) -> None:
    R = SchedulingResult
    assert engine.can_schedule([1, 2], [8, 8]) is R.Success
    assert engine.can_schedule([1, 2, 3, 4], [1] * 4) is R.BatchSequenceLimitExceeded
    assert engine.can_schedule([1, 2], [9, 8]) is R.BatchTokenLimitExceeded
    for uid in range(4):
        engine.put([uid], [[5]])
    assert engine.can_schedule([9], [1]) is R.EngineSequenceLimitExceeded
    assert engine.can_schedule([3], [1]) is R.Success
    engine.flush(3)
    engine.put([0], [list(range(3, 18))])
    assert engine.can_schedule([0], [9]) is R.SequenceTokenLimitExceeded
    assert engine.can_schedule([0], [8]) is R.Success
    # 10 blocks: 4 and two of 1 are in use, 4 are left.
    assert engine.free_blocks == 4
    assert engine.can_schedule([1], [16]) is R.Success
    engine.put([1], [[7] * 16])
    assert engine.free_blocks == 0
    assert engine.can_schedule([2], [3]) is R.Success
    assert engine.can_schedule([2], [4]) is R.KVCacheLimitExceeded


def test_a_refused_put_changes_nothing(engine: InferenceEngine) -> None:
    engine.put([1], [[5, 6, 7]])
    before = (engine.free_blocks, engine.query(1, 100, 100), engine.tracked_sequences)
    for uids, tokens, result in (
        ([1, 2], [[5] * 10, [6] * 10], SchedulingResult.BatchTokenLimitExceeded),
        ([1], [[5] * 22], SchedulingResult.BatchTokenLimitExceeded),
    ):
        with pytest.raises(SchedulingError) as caught:
            engine.put(uids, tokens)
        assert caught.value.result is result
    assert (engine.free_blocks, engine.query(1, 100, 100), engine.tracked_sequences) == before


def test_a_forward_that_fails_is_rolled_back(engine: InferenceEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine.put([1], [[5, 6, 7]])
    expected = engine.put([2], [[5, 6, 7, 8]])
    engine.flush(2)
    before = (engine.free_blocks, engine.tracked_sequences)
    with monkeypatch.context() as patch:
        patch.setattr(engine.model, "forward_mlp", lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.put([1, 2], [[8, 9], [5] * 9])
    assert (engine.free_blocks, engine.tracked_sequences) == before
    assert torch.allclose(engine.put([1], [[8]]), expected, atol=1e-5)


@pytest.mark.parametrize(
    ("uids", "tokens", "message"),
    [
        ([], [], "put of no sequences"),
        ([1], [[]], "uid 1: no tokens"),
        ([1, 1], [[5], [6]], "names a uid twice"),
        ([1, 2], [[5]], "2 uids and 1 token lists"),
        ([1], [[VOCAB_SIZE]], f"token id {VOCAB_SIZE} is outside the vocabulary of {VOCAB_SIZE}"),
        ([1], [[-1]], "token id -1 is outside"),
        ([1], [[1.5]], "token ids must be integers, given 1.5"),
        ([1], [torch.tensor([[1]])], "1-D tensor of integers"),
    ],
)
def test_bad_input_is_named(engine: InferenceEngine, uids: list[int], tokens: list[list[int]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        engine.put(uids, tokens)
    with pytest.raises(ValueError, match="expected 'last' or 'all'"):
        engine.put([1], [[5]], logits="some")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="flush of uid 77, which is not tracked"):
        engine.flush(77)
    assert engine.tracked_sequences == ()


def test_query_and_remaining_capacity_count_free_slots(engine: InferenceEngine) -> None:
    assert engine.get_remaining_block_capacity(1) == 0
    assert engine.query(1, 10, 2) == (8, 2)
    assert engine.query(1, 7, 9) == (7, 2)
    engine.put([1], [[5] * 5])
    assert engine.get_remaining_block_capacity(1) == 3
    assert engine.query(1, 3, 5) == (3, 0)
    assert engine.query(1, 4, 0) == (3, 0)
    assert engine.query(1, 100, 100) == (19, 4)
    for uid in (2, 3, 4):
        engine.put([uid], [[5]])
    assert engine.query(9, 1, 1) == (0, 0)


def test_results_belong_to_the_caller(engine: InferenceEngine) -> None:
    first = engine.put([1], [[5]])
    kept = first.clone()
    engine.put([2], [[6]])
    assert torch.equal(first, kept)


def test_a_scheduler_of_ones_own_gives_the_tokens_of_llm(
    tiny_folder: Path, make_llm: Callable[..., LLM], prompts: list[list[int]]
) -> None:
    budget, length = 10, 8
    engine = build_engine(tiny_folder, num_blocks=24, block_size=4, max_num_batched_tokens=budget, max_num_seqs=budget)
    texts = {uid: list(prompt) for uid, prompt in enumerate(prompts)}
    seen = dict.fromkeys(texts, 0)
    waiting, running = list(texts), list[int]()
    while waiting or running:
        step: dict[int, list[int]] = {}
        left = budget
        for uid in [*running, *waiting]:
            new = texts[uid][seen[uid] : seen[uid] + left]
            fresh = uid not in running
            # A new sequence starts only if it can also end: the pool is not shared with more than it holds.
            whole = len(prompts[uid]) + length
            promised = sum(-(-(len(prompts[u]) + length) // 4) for u in running)
            if fresh and promised + -(-whole // 4) > 23:
                break
            trial = {**step, uid: new}
            if not new or engine.can_schedule(trial, map(len, trial.values())) is not SchedulingResult.Success:
                break
            step, left = trial, left - len(new)
            if fresh:
                waiting.remove(uid)
                running.append(uid)
        logits = engine.put(step.keys(), step.values())
        for uid, row in zip(step, logits, strict=True):
            seen[uid] += len(step[uid])
            if seen[uid] == len(texts[uid]):
                texts[uid].append(int(row.argmax()))
                if len(texts[uid]) == len(prompts[uid]) + length:
                    running.remove(uid)
                    engine.flush(uid)
    expected = make_llm(num_blocks=200).generate(prompts, max_tokens=length, ignore_eos=True)
    found = [texts[uid][len(prompt) :] for uid, prompt in enumerate(prompts)]
    assert found == [output.outputs[0].token_ids for output in expected]
    assert engine.free_blocks == 23
