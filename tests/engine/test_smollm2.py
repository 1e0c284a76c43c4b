"""The real SmolLM2-135M: greedy tokens equal transformers' in fp32, however the engine is set."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from phalanx import LLM
from phalanx.weights.embedded import pull_smollm2
from phalanx.weights.gguf import GGUFSource

Case = tuple[list[list[int]], list[list[int]]]


@pytest.fixture(scope="session")
def smollm2() -> Path:
    return pull_smollm2()


@pytest.fixture(scope="session")
def reference(smollm2: Path) -> Callable[[int, int, int], Case]:
    """Prompts of evenly spread lengths from Python's documentation, and transformers' greedy answers to each alone."""
    source = GGUFSource(smollm2)
    tokenizer = source.tokenizer()
    model = LlamaForCausalLM(LlamaConfig.from_dict(source.hf_config())).float().eval()
    missing, unknown = model.load_state_dict({name: source.read(name) for name in source.names()}, strict=False)
    assert (missing, unknown) == (["lm_head.weight"], [])
    text = tokenizer("\n".join(topics[name] for name in sorted(topics)), add_special_tokens=False)["input_ids"]

    @cache
    def make(count: int, longest: int, new: int) -> Case:
        lengths = [16 + (longest - 16) * place // (count - 1) for place in range(count)]
        prompts = [text[place * 700 : place * 700 + length] for place, length in enumerate(lengths)]
        answers = [
            model.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt)),
                max_new_tokens=new,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )[0, len(prompt) :].tolist()
            for prompt in prompts
        ]
        return prompts, answers

    return make


def check(model: Path, case: Case, **settings: Any) -> LLM:
    prompts, expected = case
    with LLM(model, dtype="float32", max_model_len=1024, **settings) as llm:
        for _ in range(2 if llm.config.prefix_cache else 1):
            outputs = llm.generate(prompts, max_tokens=len(expected[0]), ignore_eos=True)
            for output, answer in zip(outputs, expected, strict=True):
                assert output.outputs[0].token_ids == answer
        llm.core.check_idle()
    return llm


def test_it_answers_the_question(smollm2: Path) -> None:
    with LLM(smollm2, num_blocks=64) as llm:
        question = [{"role": "user", "content": "What is the capital of France?"}]
        assert llm.chat(question, max_tokens=20)[0].text == "The capital of France is Paris."


@pytest.mark.parametrize(
    "settings",
    [
        {"num_blocks": 200, "block_size": 16},
        {"num_blocks": 60, "block_size": 8, "loop": "async", "prefix_cache": False, "max_num_batched_tokens": 64},
    ],
)
def test_greedy_tokens_equal_transformers(
    settings: dict[str, Any], smollm2: Path, reference: Callable[[int, int, int], Case]
) -> None:
    check(smollm2, reference(5, 160, 12), **settings)


@pytest.mark.slow
@pytest.mark.parametrize("loop", ["plain", "async"])
@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("block_size", [8, 16, 32])
def test_32_prompts_in_every_setting(
    loop: str, prefix_cache: bool, block_size: int, smollm2: Path, reference: Callable[[int, int, int], Case]
) -> None:
    check(
        smollm2,
        reference(32, 512, 24),
        loop=loop,
        prefix_cache=prefix_cache,
        block_size=block_size,
        num_blocks=20000 // block_size,
    )


@pytest.mark.slow
@pytest.mark.parametrize("loop", ["plain", "async"])
def test_32_prompts_in_a_pool_that_preempts(
    loop: str, smollm2: Path, reference: Callable[[int, int, int], Case]
) -> None:
    llm = check(smollm2, reference(32, 512, 24), loop=loop, block_size=16, num_blocks=70)
    assert llm.core.scheduler.num_preemptions > 0


@pytest.mark.slow
def test_32_prompts_on_two_ranks(smollm2: Path, reference: Callable[[int, int, int], Case]) -> None:
    check(smollm2, reference(32, 512, 24), tensor_parallel_size=2, num_blocks=2000)
