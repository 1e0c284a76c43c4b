"""Embeddings: the hidden states of transformers, pooled, whatever the chunks, the ranks and the loop."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from phalanx import LLM


@pytest.fixture(scope="module")
def expected(tiny_folder: Path) -> Callable[[list[int], str], np.ndarray[Any, Any]]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32)

    def embedding(ids: list[int], pooling: str) -> np.ndarray[Any, Any]:
        with torch.no_grad():
            states = model(torch.tensor([ids]), output_hidden_states=True).hidden_states[-1][0].double()
        state = states[-1] if pooling == "last" else states.mean(dim=0)
        return (state / state.norm()).numpy()

    return embedding


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_num_batched_tokens": 7},
        {"max_num_batched_tokens": 7, "loop": "async"},
        {"num_blocks": 25, "max_num_batched_tokens": 16},
        {"tensor_parallel_size": 2, "max_num_batched_tokens": 16},
    ],
    ids=["whole", "chunks", "async", "few blocks", "two ranks"],
)
def test_embeddings_are_those_of_transformers(
    make_llm: Callable[..., LLM], prompts: list[list[int]], expected: Callable[..., Any], settings: dict[str, Any]
) -> None:
    llm = make_llm(dtype="float32", **settings)
    for pooling in ("last", "mean", "last"):
        found = llm.embed(prompts, pooling)
        assert all(vector.dtype == np.float32 for vector in found)
        for ids, vector in zip(prompts, found, strict=True):
            np.testing.assert_allclose(vector, expected(ids, pooling), atol=2e-6)
    # The second time, prompts of "last" were found in the cache.
    assert llm.stats().prefix_hits > 0 or "num_blocks" in settings


@pytest.mark.parametrize("loop", ["plain", "async"])
def test_answers_beside_embeddings_are_what_they_were(
    make_llm: Callable[..., LLM], prompts: list[list[int]], expected: Callable[..., Any], loop: str
) -> None:
    llm = make_llm(dtype="float32", max_num_batched_tokens=16, loop=loop, max_num_seqs=5)
    alone = [output.outputs[0].token_ids for output in llm.generate(prompts, max_tokens=8, ignore_eos=True)]
    names = {}
    for index, ids in enumerate(prompts):
        names[llm.add_request(ids, {"max_tokens": 8, "ignore_eos": True})] = ("answer", index)
        names[llm.add_request(ids, pooling="mean" if index % 2 else "last")] = ("embedding", index)
    aborted = llm.add_request(prompts[-1], pooling="mean")
    left = 2
    while llm.has_work:
        for group in llm.step():
            if not group.finished:
                continue
            kind, index = names[group.request_id]
            output = group.output()
            if kind == "answer":
                assert output.outputs[0].token_ids == alone[index] and output.embedding is None
            else:
                pooling = "mean" if index % 2 else "last"
                np.testing.assert_allclose(output.embedding, expected(prompts[index], pooling), atol=2e-6)
            del names[group.request_id]
        left -= 1
        if not left:
            llm.abort(aborted)
    assert not names


def test_a_prompt_may_fill_the_context(make_llm: Callable[..., LLM], expected: Callable[..., Any]) -> None:
    llm = make_llm(dtype="float32", max_model_len=32)
    ids = list(range(3, 35))
    np.testing.assert_allclose(llm.embed(ids)[0], expected(ids, "last"), atol=2e-6)
    assert np.dot(llm.embed("hello")[0], llm.embed("hello", "mean")[0]) < 0.999
    with pytest.raises(ValueError, match="prompt 1: the prompt has 33 tokens, the limit is 32"):
        llm.embed([[5], [*ids, 35]])
    with pytest.raises(ValueError, match="pooling='max': expected one of last, mean"):
        llm.embed("hello", "max")  # type: ignore[arg-type]


@pytest.mark.parametrize("family", ["opt", "generic"])
def test_other_families(family: str, tmp_path: Path) -> None:
    import transformers

    torch.manual_seed(0)
    if family == "opt":
        config: Any = transformers.OPTConfig(
            vocab_size=90,
            hidden_size=32,
            ffn_dim=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=64,
            word_embed_proj_dim=16,
        )
    else:
        config = transformers.StableLmConfig(
            vocab_size=90,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=64,
        )
    model: Any = transformers.AutoModelForCausalLM.from_config(config).eval()
    model.save_pretrained(tmp_path)
    prompts = [list(range(5, 5 + length)) for length in (1, 9, 20)]
    with LLM(tmp_path, num_blocks=64, block_size=4, max_num_batched_tokens=8, dtype="float32") as llm:
        alone = [output.outputs[0].token_ids for output in llm.generate(prompts, max_tokens=4, ignore_eos=True)]
        beside = [llm.group_of(llm.add_request(ids, {"max_tokens": 4, "ignore_eos": True})) for ids in prompts]
        found = llm.embed(prompts, "mean")
        while llm.has_work:
            llm.step()
        assert [group.output().outputs[0].token_ids for group in beside] == alone
        for ids, vector in zip(prompts, found, strict=True):
            with torch.no_grad():
                state = model(torch.tensor([ids]), output_hidden_states=True).hidden_states[-1][0].mean(dim=0)
            np.testing.assert_allclose(vector, state / state.norm(), atol=2e-6)
