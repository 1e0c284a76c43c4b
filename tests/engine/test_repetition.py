"""Steps that only go on: the tokens are those of an engine that asks its scheduler in every step."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from phalanx import LLM, SamplingParams
from phalanx.engine.repetition import Repetition
from phalanx.engine.scheduler import Scheduler
from phalanx.engine.step import Step, decode, encode
from tests.tiny_tokenizer import VOCAB_SIZE


def ways() -> list[SamplingParams]:
    return [
        SamplingParams(max_tokens=25, ignore_eos=True),
        SamplingParams(max_tokens=11, temperature=1.0, seed=5, ignore_eos=True),
        SamplingParams(max_tokens=30, repetition_penalty=1.2, logprobs=2),
        SamplingParams(max_tokens=18, n=2, temperature=0.8, seed=2, ignore_eos=True),
        SamplingParams(max_tokens=1),
    ]


def run(llm: LLM, seed: int) -> dict[str, list[Any]]:
    """Requests that come and go at random moments; the answers of those that were not aborted."""
    chance = random.Random(seed)
    answers: dict[str, list[Any]] = {}
    names: list[str] = []
    left = 14
    while left or llm.has_work:
        if left and chance.random() < 0.15:
            left -= 1
            prompt = [chance.randrange(3, VOCAB_SIZE) for _ in range(chance.randrange(1, 30))]
            names.append(llm.add_request(prompt, chance.choice(ways()), request_id=str(left)))
        if names and chance.random() < 0.02:
            llm.abort(names.pop(chance.randrange(len(names))))
        for group in llm.step():
            if group.finished and group.request_id in names:
                names.remove(group.request_id)
                outputs = group.output().outputs
                answers[group.request_id] = [(o.token_ids, o.finish_reason, o.logprobs) for o in outputs]
    return answers


@pytest.mark.parametrize("loop", ["plain", "async"])
@pytest.mark.parametrize("blocks", [400, 40], ids=["roomy", "scarce"])
@pytest.mark.parametrize("seed", [0, 1])
def test_tokens_are_those_of_scheduled_steps(
    make_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch, loop: str, blocks: int, seed: int
) -> None:
    settings: dict[str, Any] = {"loop": loop, "num_blocks": blocks, "max_num_seqs": 4, "dtype": "float32"}
    repeated = make_llm(**settings)
    asked: list[int] = []
    schedule = Scheduler.schedule
    monkeypatch.setattr(Scheduler, "schedule", lambda self, drained: (asked.append(1), schedule(self, drained))[1])
    found = run(repeated, seed)
    assert len(asked) < 0.8 * repeated.core.steps
    monkeypatch.setattr(Repetition, "go_on", lambda self: None)
    scheduled = make_llm(**settings)
    expected = run(scheduled, seed)
    # Aborted at the same step, a request may have had its end in one loop already: those of both are compared.
    assert found.keys() == expected.keys() and len(found) > 8
    for name, answer in expected.items():
        for (ids, reason, logprobs), (ids_, reason_, logprobs_) in zip(found[name], answer, strict=True):
            assert (ids, reason) == (ids_, reason_)
            assert str(logprobs) == str(logprobs_)


def test_a_full_engine_goes_on_although_requests_wait(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm(max_num_seqs=2, num_blocks=200)
    for _ in range(3):
        llm.add_request([5, 6, 7], SamplingParams(max_tokens=30, ignore_eos=True))
    launched: list[bool] = []
    launch = llm.engine.executor.launch

    def noted(step: Any) -> Any:
        launched.append(step.further is not None)
        # What the other ranks would be told.
        assert decode(encode(step)) == step
        return launch(step)

    llm.engine.executor.launch = noted  # type: ignore[method-assign]
    while llm.has_work:
        llm.step()
    # A first step of prompts, a first one of answers; and again when the third has its place.
    assert launched.count(False) <= 6
    assert launched.count(True) >= 50


def test_a_runner_refuses_to_go_on_with_nothing(make_llm: Callable[..., LLM]) -> None:
    with pytest.raises(RuntimeError, match="no decode step"):
        make_llm().engine.runner.launch(Step(0, [], [], [], further=[]))
