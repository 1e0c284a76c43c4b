"""Sampling options through the whole engine: honoured alike by both loops, whatever runs beside them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from phalanx import LLM
from tests.models.tiny import error
from tests.tiny_tokenizer import VOCAB_SIZE

PROMPT = [20, 21, 22, 23, 24, 25, 26]
OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": {"temperature": 1.0, "seed": 3},
    "filtered": {"temperature": 0.9, "seed": 4, "top_k": 30, "top_p": 0.9, "min_p": 0.01},
    "repetition": {"repetition_penalty": 1.4},
    "presence": {"presence_penalty": 5.0, "frequency_penalty": 2.0},
    "seeded penalties": {"temperature": 1.0, "seed": 5, "repetition_penalty": 1.2, "frequency_penalty": 0.3},
    "bias": {"logit_bias": {40: 4.0, 41: -100.0}},
    "bad words": {"bad_words": ["a", "he"]},
    "logprobs": {"logprobs": 3},
}


@pytest.fixture(scope="module")
def model(tiny_folder: Path) -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(tiny_folder).eval()


def tokens(llm: LLM, prompt: list[int] = PROMPT, **options: Any) -> list[int]:
    return llm.generate([prompt], max_tokens=16, ignore_eos=True, **options)[0].outputs[0].token_ids


def test_options_do_not_depend_on_loop_batch_or_order(make_llm: Callable[..., LLM]) -> None:
    alone = {name: tokens(make_llm(prefix_cache=False), **options) for name, options in OPTIONS.items()}
    same = [name for name, found in alone.items() if found == alone["greedy"]]
    assert same == ["greedy", "bad words", "logprobs"]
    for loop in ("plain", "async"):
        llm = make_llm(loop=loop, num_blocks=200)
        for order in (list(OPTIONS), list(reversed(OPTIONS))):
            params = [{**OPTIONS[name], "max_tokens": 16, "ignore_eos": True} for name in order]
            outputs = llm.generate([PROMPT] * len(order), [as_params(p) for p in params])
            for name, output in zip(order, outputs, strict=True):
                assert output.outputs[0].token_ids == alone[name], (loop, name)


def as_params(values: dict[str, Any]) -> Any:
    from phalanx import SamplingParams

    return SamplingParams(**values)


@pytest.mark.parametrize("penalty", [0.6, 1.3])
def test_repetition_penalty_equals_generate(
    model: LlamaForCausalLM, make_llm: Callable[..., LLM], penalty: float
) -> None:
    expected = model.generate(
        torch.tensor([PROMPT]), max_new_tokens=16, min_new_tokens=16, do_sample=False, repetition_penalty=penalty
    )[0, len(PROMPT) :].tolist()
    found = tokens(make_llm(), repetition_penalty=penalty, logit_bias={2: -100.0})
    assert found == expected


def test_several_answers_are_those_of_their_own_seeds(make_llm: Callable[..., LLM]) -> None:
    for settings in ({}, {"prefix_cache": False}, {"loop": "async"}, {"max_num_batched_tokens": 3}):
        llm = make_llm(num_blocks=200, **settings)
        outputs = llm.generate([PROMPT], temperature=1.0, seed=9, n=4, max_tokens=16, ignore_eos=True)[0].outputs
        assert [output.index for output in outputs] == [0, 1, 2, 3]
        for output in outputs:
            assert output.token_ids == tokens(llm, temperature=1.0, seed=9 + output.index)


def test_several_answers_compute_the_prompt_once(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm(prefix_cache=False, num_blocks=200)
    computed = []
    launch = llm.engine.runner.launch
    llm.engine.runner.launch = lambda step: (computed.append(sum(row.count for row in step.rows)), launch(step))[1]  # type: ignore[method-assign]
    prompt = list(range(3, 3 + 40))
    llm.generate([prompt], temperature=1.0, n=5, max_tokens=2, ignore_eos=True)
    # 40 once, for each of the 4 others the last block of 4, and the first of two tokens of each.
    assert sum(computed) == 40 + 4 * 4 + 5


def test_without_a_seed_answers_differ_and_an_engine_seed_repeats_them(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm()
    assert tokens(llm, temperature=1.0) != tokens(llm, temperature=1.0)
    runs = [[tokens(llm, temperature=1.0) for _ in range(2)] for llm in (make_llm(seed=1), make_llm(seed=1))]
    assert runs[0] == runs[1] and runs[0][0] != runs[0][1]


def test_logprobs_equal_transformers(model: LlamaForCausalLM, make_llm: Callable[..., LLM]) -> None:
    output = make_llm().generate([PROMPT], max_tokens=6, logprobs=4, temperature=0.7, seed=1, repetition_penalty=1.3)[0]
    ids = output.outputs[0].token_ids
    with torch.no_grad():
        expected = model(torch.tensor([PROMPT + ids])).logits[0].log_softmax(-1)
    logprobs = output.outputs[0].logprobs
    assert logprobs is not None and len(logprobs) == len(ids)
    for place, (token, entry) in enumerate(zip(ids, logprobs, strict=True)):
        row = expected[len(PROMPT) + place - 1]
        assert next(iter(entry)) == token
        assert set(entry) == {token, *row.topk(4).indices.tolist()}
        assert error(torch.tensor(list(entry.values())), row[list(entry)]) < 1e-4


@pytest.mark.parametrize("budget", [3, 64])
@pytest.mark.parametrize("max_tokens", [0, 3])
@pytest.mark.parametrize("loop", ["plain", "async"])
def test_prompt_logprobs_equal_transformers(
    model: LlamaForCausalLM, make_llm: Callable[..., LLM], budget: int, max_tokens: int, loop: str
) -> None:
    llm = make_llm(max_num_batched_tokens=budget, loop=loop)
    llm.generate([PROMPT], max_tokens=1)
    output = llm.generate([PROMPT], max_tokens=max_tokens, prompt_logprobs=2)[0]
    assert len(output.outputs[0].token_ids) == max_tokens
    with torch.no_grad():
        expected = model(torch.tensor([PROMPT])).logits[0].log_softmax(-1)
    logprobs = output.prompt_logprobs
    assert logprobs is not None and len(logprobs) == len(PROMPT) and logprobs[0] is None
    for place, (token, entry) in enumerate(zip(PROMPT[1:], logprobs[1:], strict=True)):
        assert entry is not None and next(iter(entry)) == token
        assert set(entry) == {token, *expected[place].topk(2).indices.tolist()}
        assert error(torch.tensor(list(entry.values())), expected[place, list(entry)]) < 1e-4


def test_bad_words_and_biased_tokens_never_come(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm()
    free = llm.generate([PROMPT], max_tokens=16, ignore_eos=True)[0].outputs[0].token_ids
    banned = free[3]
    found = tokens(llm, logit_bias={banned: -100})
    assert banned not in found and found[:3] == free[:3]
    text = llm.tokenizer.decode(free[2:4])
    found = tokens(llm, bad_words=[text])
    ids = llm.tokenizer(text, add_special_tokens=False)["input_ids"]
    assert all(found[k : k + len(ids)] != ids for k in range(len(found)))


def test_ids_beyond_the_vocabulary_cannot_come(tiny_folder: Path) -> None:
    from phalanx.distributed.thread_group import run_threads

    def run(group: Any) -> list[int]:
        llm = LLM(tiny_folder, group=group, tensor_parallel_size=2, num_blocks=64)
        output = llm.generate([PROMPT], temperature=100.0, seed=0, max_tokens=200, ignore_eos=True)[0]
        return output.outputs[0].token_ids

    assert VOCAB_SIZE % 2 == 1
    for found in run_threads(2, run):
        assert min(found) >= 0 and max(found) < VOCAB_SIZE


def test_a_preempted_answer_shares_no_more_than_the_prompt(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm(num_blocks=14, max_num_batched_tokens=5, max_num_seqs=4, prefix_cache=False)
    wishes: list[tuple[list[int], dict[str, Any]]] = [
        (list(range(40, 50)), {"max_tokens": 5, "temperature": 1.0, "seed": 2, "n": 2}),
        ([61, 88, 139, 18, 4, 171, 108, 154, 158, 101], {"max_tokens": 12, "temperature": 1.0, "seed": 0, "n": 2}),
        (list(range(40, 53)), {"max_tokens": 3}),
        ([40, 41, 42], {"max_tokens": 12, "temperature": 1.0, "seed": 1, "n": 3}),
    ]
    prompts = [prompt for prompt, _ in wishes]
    params = [as_params({**options, "top_p": 0.9, "ignore_eos": True}) for _, options in wishes]
    found = llm.generate(prompts, params)
    assert llm.core.scheduler.num_preemptions > 0
    expected = make_llm(num_blocks=300, prefix_cache=False).generate(prompts, params)
    assert [o.outputs for o in found] == [o.outputs for o in expected]
