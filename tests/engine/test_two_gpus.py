"""Two GPUs: the tokens of one, whichever way the ranks add up, through graphs and the asynchronous loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from phalanx import LLM, SamplingParams
from tests.models.tiny import llama, llama_config, save
from tests.tiny_tokenizer import VOCAB_SIZE, tiny_tokenizer

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")

SETTINGS = [
    SamplingParams(max_tokens=40, ignore_eos=True),
    SamplingParams(max_tokens=30, temperature=1.0, seed=3, top_p=0.9, ignore_eos=True),
    SamplingParams(max_tokens=25, repetition_penalty=1.3, presence_penalty=0.5, logprobs=2, ignore_eos=True),
]


@pytest.fixture(scope="module")
def even_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model whose sizes the ranks share evenly, as batch invariance needs it."""
    folder = tmp_path_factory.mktemp("even")
    config = llama_config(vocab_size=VOCAB_SIZE, max_position_embeddings=256, intermediate_size=96)
    tiny_tokenizer().save_pretrained(folder)
    return save(llama(config, seed=3), folder)


def answers(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    params = [SETTINGS[place % len(SETTINGS)] for place in range(len(prompts))]
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params)]


@pytest.mark.parametrize("all_reduce", ["nccl", "shared_memory"])
@pytest.mark.parametrize("case", ["float32", "bfloat16 batch-invariant"])
def test_tokens_are_those_of_one_gpu(even_folder: Path, prompts: list[list[int]], case: str, all_reduce: str) -> None:
    dtype, _, invariant = case.partition(" ")
    settings: dict[str, Any] = {"dtype": dtype, "batch_invariant": bool(invariant), "num_blocks": 400, "block_size": 4}
    with LLM(even_folder, loop="plain", cuda_graphs=False, **settings) as llm:
        expected = answers(llm, prompts)
    settings |= {"tensor_parallel_size": 2, "all_reduce": all_reduce, "loop": "async", "max_num_seqs": 12}
    with LLM(even_folder, **settings) as two:
        assert answers(two, prompts) == expected
        assert answers(two, prompts) == expected
