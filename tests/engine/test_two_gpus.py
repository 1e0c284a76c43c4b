"""Two GPUs: the tokens of one, whichever way the ranks add up, through graphs and the asynchronous loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from phalanx import LLM, SamplingParams

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")

SETTINGS = [
    SamplingParams(max_tokens=40, ignore_eos=True),
    SamplingParams(max_tokens=30, temperature=1.0, seed=3, top_p=0.9, ignore_eos=True),
    SamplingParams(max_tokens=25, repetition_penalty=1.3, presence_penalty=0.5, logprobs=2, ignore_eos=True),
]


def answers(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    params = [SETTINGS[place % len(SETTINGS)] for place in range(len(prompts))]
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params)]


@pytest.mark.parametrize("all_reduce", ["nccl", "shared_memory"])
@pytest.mark.parametrize("case", ["float32", "bfloat16 batch-invariant"])
def test_tokens_are_those_of_one_gpu(
    make_llm: Callable[..., LLM], prompts: list[list[int]], case: str, all_reduce: str
) -> None:
    dtype, _, invariant = case.partition(" ")
    settings: dict[str, Any] = {"dtype": dtype, "batch_invariant": bool(invariant), "num_blocks": 400}
    expected = answers(make_llm(loop="plain", cuda_graphs=False, **settings), prompts)
    two = make_llm(tensor_parallel_size=2, loop="async", all_reduce=all_reduce, max_num_seqs=12, **settings)
    assert answers(two, prompts) == expected
    assert answers(two, prompts) == expected
