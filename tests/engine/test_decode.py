"""Decode steps in fixed shapes: padded, and on a GPU captured, they give the tokens of the general path and touch
nothing else."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from phalanx import LLM, SamplingParams
from phalanx.engine.decode import DecodeStep, decode_sizes
from tests.models.tiny import llama, llama_config, save
from tests.tiny_tokenizer import VOCAB_SIZE

ON_GPU = torch.cuda.is_available()
needs_gpu = pytest.mark.skipif(not ON_GPU, reason="graphs are captured on a GPU")

SETTINGS = [
    SamplingParams(max_tokens=17, ignore_eos=True),
    SamplingParams(max_tokens=9, temperature=1.0, seed=3, top_p=0.9, ignore_eos=True),
    SamplingParams(max_tokens=12, repetition_penalty=1.3, presence_penalty=0.5, logprobs=2, ignore_eos=True),
    SamplingParams(max_tokens=1, ignore_eos=True),
]


def padded(llm: LLM, sizes: list[int]) -> LLM:
    """The engine with decode steps of these sizes, launch by launch."""
    runner = llm.engine.runner
    runner.decode = DecodeStep(runner.model, runner.tokens, runner.block_tables, runner.staging, sizes)
    return llm


def answers(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    params = [SETTINGS[place % len(SETTINGS)] for place in range(len(prompts))]
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params)]


def test_sizes_are_small_ones_then_every_eighth() -> None:
    assert decode_sizes(1) == [1]
    assert decode_sizes(20) == [1, 2, 4, 8, 16, 20]
    assert decode_sizes(24) == [1, 2, 4, 8, 16, 24]


@pytest.mark.parametrize("loop", ["plain", "async"])
@pytest.mark.parametrize("sizes", [[12], [1, 2, 4, 8, 12]])
def test_tokens_equal_those_of_the_general_path(
    make_llm: Callable[..., LLM], prompts: list[list[int]], loop: str, sizes: list[int]
) -> None:
    settings: dict[str, Any] = {"max_num_seqs": 12, "loop": loop, "num_blocks": 400, "dtype": "float32"}
    expected = answers(make_llm(cuda_graphs=False, **settings), prompts)
    assert answers(padded(make_llm(cuda_graphs=False, **settings), sizes), prompts) == expected
    if ON_GPU:
        assert answers(make_llm(**settings), prompts) == expected


def test_padding_and_replays_touch_no_block_but_their_own(
    make_llm: Callable[..., LLM], prompts: list[list[int]]
) -> None:
    settings: dict[str, Any] = {"max_num_seqs": 8, "num_blocks": 300, "prefix_cache": False, "dtype": "float32"}
    expected = answers(make_llm(cuda_graphs=False, **settings), prompts)
    llm = make_llm(**settings)
    if not ON_GPU:
        padded(llm, [8])
    storage = llm.engine.runner.storage
    assert storage is not None
    blocks = storage.memory.view(storage.num_blocks, -1)
    # All ones are NaN in every dtype: what is read but was never written would show in the tokens.
    blocks.fill_(0xFF)
    taken: set[int] = set()
    allocate = llm.engine.kv.pool.allocate

    def noted(count: int) -> list[int]:
        given = allocate(count)
        taken.update(given)
        return given

    llm.engine.kv.pool.allocate = noted  # type: ignore[method-assign]
    assert answers(llm, prompts) == expected
    untouched = [block for block in range(1, storage.num_blocks) if block not in taken]
    assert untouched and bool((blocks[untouched] == 0xFF).all())


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What Triton compiles from now on."""
    from triton import knobs

    found: list[Any] = []
    monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", lambda *args, **rest: found.append(rest) and None)
    return found


@needs_gpu
def test_mixed_batches_of_longer_contexts_compile_nothing(tmp_path: Path, compiled: list[Any]) -> None:
    """Of many sequences, so that short contexts are not split, where the longest that the model takes would be."""
    config = llama_config(vocab_size=VOCAB_SIZE, max_position_embeddings=4096)
    settings: dict[str, Any] = {"dtype": "bfloat16", "max_num_seqs": 96, "max_num_batched_tokens": 2048}
    llm = LLM(save(llama(config), tmp_path), **settings)
    compiled.clear()
    mixed, launch = 0, llm.engine.executor.launch

    def noted(step: Any) -> Any:
        nonlocal mixed
        mixed = max(mixed, len(step.rows) if sum(row.count for row in step.rows) > len(step.rows) else 0)
        return launch(step)

    llm.engine.executor.launch = noted  # type: ignore[method-assign]
    for longest in (650, 1500):
        chance = random.Random(longest)
        prompts = [[chance.randrange(VOCAB_SIZE) for _ in range(chance.randint(500, longest))] for _ in range(96)]
        llm.generate(prompts, max_tokens=100, ignore_eos=True)
    llm.close()
    assert mixed > 90
    assert not compiled


@needs_gpu
def test_nothing_is_compiled_or_allocated_once_it_runs(
    make_llm: Callable[..., LLM], prompts: list[list[int]], compiled: list[Any]
) -> None:
    llm = make_llm(max_num_seqs=12, num_blocks=400)
    compiled.clear()
    answers(llm, prompts)
    segments = torch.cuda.memory_stats()["num_device_alloc"]
    answers(llm, [prompt[::-1] for prompt in prompts])
    assert not compiled
    assert torch.cuda.memory_stats()["num_device_alloc"] == segments


@needs_gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tokens_do_not_depend_on_batch_chunks_or_graphs(
    make_llm: Callable[..., LLM], prompts: list[list[int]], dtype: str
) -> None:
    invariant: dict[str, Any] = {"dtype": dtype, "batch_invariant": True, "num_blocks": 400, "prefix_cache": False}
    alone = make_llm(max_num_seqs=1, max_num_batched_tokens=7, loop="plain", cuda_graphs=False, **invariant)
    expected = [answers(alone, [prompt])[0] for prompt in prompts]
    together = make_llm(max_num_seqs=12, loop="async", **invariant)
    params = [SETTINGS[0]] * len(prompts)
    assert [output.outputs[0].token_ids for output in together.generate(prompts, params)] == expected


def test_an_fp8_cache_takes_half_the_memory_and_answers_nearly_alike(
    make_llm: Callable[..., LLM], prompts: list[list[int]]
) -> None:
    narrow, full = (make_llm(kv_cache_dtype=kind, dtype="bfloat16") for kind in ("fp8", "auto"))
    storages = [llm.engine.runner.storage for llm in (narrow, full)]
    assert storages[0] is not None and storages[1] is not None
    assert 2 * storages[0].block_bytes == storages[1].block_bytes
    logprobs = [
        llm.generate(prompts[-1], SamplingParams(max_tokens=1, prompt_logprobs=0))[0].prompt_logprobs
        for llm in (narrow, full)
    ]
    values = [torch.tensor([next(iter(entry.values())) for entry in found[1:]]) for found in logprobs if found]
    difference = (values[0] - values[1]).abs()
    assert 0 < float(difference.mean()) < 0.2
