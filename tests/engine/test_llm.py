"""LLM answers like transformers, whatever the loop, the pool, the batch or the ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from phalanx import LLM
from phalanx.distributed.thread_group import run_threads
from phalanx.engine.outputs import RequestOutput

LENGTH = 20


@pytest.fixture(scope="module")
def greedy(tiny_folder: Path) -> Callable[[list[int]], list[int]]:
    """transformers' greedy answer to a prompt alone."""
    model = LlamaForCausalLM.from_pretrained(tiny_folder).eval()

    def answer(prompt: list[int]) -> list[int]:
        out = model.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), max_new_tokens=LENGTH, do_sample=False
        )
        return out[0, len(prompt) :].tolist()

    return answer


def ids(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize("loop", ["plain", "async"])
@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_greedy_answers_equal_transformers(
    loop: str,
    block_size: int,
    prefix_cache: bool,
    make_llm: Callable[..., LLM],
    prompts: list[list[int]],
    greedy: Callable[[list[int]], list[int]],
) -> None:
    llm = make_llm(loop=loop, block_size=block_size, prefix_cache=prefix_cache, num_blocks=1000 // block_size)
    expected = [greedy(prompt) for prompt in prompts]
    assert ids(llm.generate(prompts, max_tokens=LENGTH)) == expected
    again = llm.generate(prompts, max_tokens=LENGTH)
    assert ids(again) == expected
    assert any(output.cached_tokens for output in again) == prefix_cache


@pytest.mark.parametrize("loop", ["plain", "async"])
def test_preemption_changes_nothing(
    loop: str, make_llm: Callable[..., LLM], prompts: list[list[int]], greedy: Callable[[list[int]], list[int]]
) -> None:
    # 16 blocks of 4 hold the longest request alone (40 + 20 tokens) and little beside it.
    llm = make_llm(loop=loop, num_blocks=17, max_num_batched_tokens=16)
    assert llm.max_model_len == 64
    outputs = llm.generate(prompts, max_tokens=LENGTH)
    assert ids(outputs) == [greedy(prompt) for prompt in prompts]
    assert llm.core.scheduler.num_preemptions > 0


@pytest.mark.parametrize("budget", [1, 7, 64])
@pytest.mark.parametrize("loop", ["plain", "async"])
def test_any_token_budget_gives_the_same_tokens(
    budget: int,
    loop: str,
    make_llm: Callable[..., LLM],
    prompts: list[list[int]],
    greedy: Callable[[list[int]], list[int]],
) -> None:
    llm = make_llm(loop=loop, max_num_batched_tokens=budget, num_blocks=300)
    assert ids(llm.generate(prompts[-3:], max_tokens=LENGTH)) == [greedy(prompt) for prompt in prompts[-3:]]


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_of_a_given_group_all_get_the_answers(
    world: int, tiny_folder: Path, prompts: list[list[int]], greedy: Callable[[list[int]], list[int]]
) -> None:
    def run(group: Any) -> list[RequestOutput]:
        llm = LLM(tiny_folder, group=group, tensor_parallel_size=world, num_blocks=64, block_size=4)
        return llm.generate(prompts, max_tokens=LENGTH)

    found = run_threads(world, run)
    assert ids(found[0]) == [greedy(prompt) for prompt in prompts]
    assert all(outputs == found[0] for outputs in found)


def test_more_requests_than_places_all_finish(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm(num_blocks=13, max_num_seqs=8, max_num_batched_tokens=24)
    generator = torch.Generator().manual_seed(5)
    count = 1000
    lengths = torch.randint(1, 9, (count,), generator=generator).tolist()
    prompts = [torch.randint(3, 200, (length,), generator=generator).tolist() for length in lengths]
    seen: list[str] = []
    outputs = llm.generate(
        prompts, max_tokens=7, ignore_eos=True, on_finish=lambda output: seen.append(output.request_id)
    )
    assert len(outputs) == len(set(seen)) == count
    assert all(len(output.outputs[0].token_ids) == 7 for output in outputs)


def test_the_same_prompt_of_whole_blocks_twice(
    make_llm: Callable[..., LLM], greedy: Callable[[list[int]], list[int]]
) -> None:
    llm = make_llm()
    prompt = list(range(10, 30))
    first, second = (llm.generate([prompt], max_tokens=LENGTH)[0] for _ in range(2))
    assert first.outputs == second.outputs
    assert first.outputs[0].token_ids == greedy(prompt)
    assert (first.cached_tokens, second.cached_tokens) == (0, 16)


def test_salts_share_nothing(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm()
    prompt = list(range(10, 30))
    llm.generate([prompt], max_tokens=2, cache_salt="a")
    assert llm.generate([prompt], max_tokens=2, cache_salt="b")[0].cached_tokens == 0
    assert llm.generate([prompt], max_tokens=2, cache_salt="a")[0].cached_tokens == 16


def test_hashes_that_always_collide_change_nothing(
    tiny_folder: Path,
    prompts: list[list[int]],
    greedy: Callable[[list[int]], list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("phalanx.engine.prefix_cache.hash_block", lambda parent, content: b"same")
    llm = LLM(tiny_folder, num_blocks=200, block_size=4)
    expected = [greedy(prompt) for prompt in prompts]
    for _ in range(2):
        assert ids(llm.generate(prompts, max_tokens=LENGTH)) == expected
        llm.core.check_idle()


@pytest.mark.parametrize("loop", ["plain", "async"])
def test_aborting_at_any_step_leaves_the_others_alone(
    loop: str, make_llm: Callable[..., LLM], greedy: Callable[[list[int]], list[int]]
) -> None:
    shared = list(range(20, 40))
    texts = [[*shared, k] for k in range(50, 53)]
    expected = [greedy(text) for text in texts]
    for at in range(LENGTH + 4):
        llm = make_llm(loop=loop, num_blocks=40, max_num_batched_tokens=16)
        names = [llm.add_request(text, {"max_tokens": LENGTH}) for text in texts]
        groups = [llm.group_of(name) for name in names]
        for _ in range(at):
            llm.step()
        llm.abort(names[1])
        llm.abort(names[1])
        llm.abort("unknown")
        while llm.has_work:
            llm.step()
        assert [groups[k].requests[0].tokens[len(texts[k]) :] for k in (0, 2)] == [expected[0], expected[2]]
        assert groups[1].requests[0].finish_reason in ("abort", "length", "stop")
        llm.core.check_idle()


def test_stream_is_the_answer_in_pieces(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm()
    whole = llm.generate("hello there", max_tokens=LENGTH)[0].outputs[0]
    chunks = list(llm.stream("hello there", max_tokens=LENGTH))
    assert "".join(chunk.text for chunk in chunks) == whole.text
    assert [token for chunk in chunks for token in chunk.token_ids] == whole.token_ids
    assert chunks[-1].finish_reason == whole.finish_reason


def test_leaving_a_stream_early_frees_its_blocks(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm()
    stream = llm.stream("hello there", max_tokens=LENGTH)
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    # The asynchronous loop has a step in flight.
    llm.step()
    assert not llm.has_work
    assert llm.generate("hello", max_tokens=2)[0].outputs[0].finish_reason == "length"


def test_max_tokens_absent_takes_the_rest_of_the_context(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm(num_blocks=11)
    output = llm.generate([[5, 6, 7]], ignore_eos=True)[0].outputs[0]
    assert (len(output.token_ids), output.finish_reason) == (llm.max_model_len - 3, "length")


def test_end_tokens_are_the_union_of_all_places(
    make_llm: Callable[..., LLM], tiny_folder: Path, tmp_path: Path
) -> None:
    import json
    import shutil

    free = make_llm().generate([[9, 8, 7]], max_tokens=LENGTH, ignore_eos=True)[0].outputs[0].token_ids
    for file in ("generation_config.json", "config.json"):
        folder = tmp_path / file.partition(".")[0]
        shutil.copytree(tiny_folder, folder)
        values = json.loads((folder / file).read_text())
        values["eos_token_id"] = [2, free[4]]
        (folder / file).write_text(json.dumps(values))
        llm = LLM(folder, num_blocks=64)
        output = llm.generate([[9, 8, 7]], max_tokens=LENGTH)[0].outputs[0]
        first = free.index(free[4])
        assert output.token_ids == free[: first + 1]
        assert (output.finish_reason, output.stop_reason) == ("stop", free[4])
        late = llm.generate([[9, 8, 7]], max_tokens=LENGTH, min_tokens=first + 1)[0].outputs[0]
        assert len(late.token_ids) > first + 1 and late.token_ids[:first] == free[:first]
