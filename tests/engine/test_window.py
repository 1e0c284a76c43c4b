"""Layers with a window beside others: transformers' logits and tokens, and blocks outside a window come back."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from phalanx import LLM, build_engine
from phalanx.models import POLICIES, InferencePolicy, TransformerModel
from phalanx.models.llama import LlamaLayer, LlamaOuter
from tests.models.tiny import error, reference
from tests.tiny_tokenizer import VOCAB_SIZE

WINDOW, LENGTH = 10, 60


class WindowedModel(TransformerModel):
    """A Qwen2: biases on Q, K and V, and a window on some layers."""

    @cached_property
    def qkv_bias(self) -> bool:
        return True

    def window(self, layer: int) -> int | None:
        kinds = self.config.layer_types
        return int(self.config.sliding_window) if kinds[layer] == "sliding_attention" else None


@pytest.fixture(scope="module", autouse=True)
def policy() -> Iterator[None]:
    known = dict(POLICIES)

    class WindowedPolicy(InferencePolicy, replace=True):
        model_types = ("qwen2",)
        model_class = WindowedModel
        layer_container = LlamaLayer
        outer_container = LlamaOuter

    yield
    POLICIES.clear()
    POLICIES.update(known)


@pytest.fixture(scope="module", params=["all", "half"])
def model(request: pytest.FixtureRequest) -> Any:
    torch.manual_seed(0)
    config = Qwen2Config(
        hidden_size=48,
        intermediate_size=70,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCAB_SIZE,
        max_position_embeddings=256,
        use_sliding_window=True,
        sliding_window=WINDOW,
        max_window_layers=0 if request.param == "all" else 2,
    )
    model = Qwen2ForCausalLM(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


@pytest.fixture(scope="module")
def folder(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("windowed")
    model.save_pretrained(path)
    return path


@pytest.mark.parametrize("size", [LENGTH, 7, 1])
def test_logits_past_the_window(size: int, model: Any, folder: Path) -> None:
    ids = torch.randint(3, VOCAB_SIZE, (LENGTH,), generator=torch.Generator().manual_seed(1)).tolist()
    expected = reference(model, ids, [LENGTH])
    engine = build_engine(folder, num_blocks=80, block_size=4)
    found = [engine.put([0], [ids[start : start + size]], logits="all") for start in range(0, LENGTH, size)]
    assert error(torch.cat(found), expected) < 1e-4


@pytest.mark.parametrize("loop", ["plain", "async"])
@pytest.mark.parametrize("num_blocks", [200, 45])
def test_answers_and_freed_blocks(loop: str, num_blocks: int, model: Any, folder: Path) -> None:
    generator = torch.Generator().manual_seed(2)
    prompts = [torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist() for length in (3, 25, 40, 40, 31)]
    prompts[3] = prompts[2][:30] + prompts[3][30:]
    expected = [
        model.generate(torch.tensor([p]), max_new_tokens=12, min_new_tokens=12, do_sample=False)[0, len(p) :].tolist()
        for p in prompts
    ]
    llm = LLM(folder, num_blocks=num_blocks, block_size=4, loop=loop, max_num_batched_tokens=32)
    for _ in range(2):
        outputs = llm.generate(prompts, max_tokens=12, ignore_eos=True)
        assert [output.outputs[0].token_ids for output in outputs] == expected
        llm.core.check_idle()
    name = llm.add_request(prompts[2], {"max_tokens": 12, "ignore_eos": True})
    request = llm.group_of(name).requests[0]
    while request.num_generated < 8:
        llm.step()
    for group, window in enumerate(llm.core.kv.windows):
        live = sum(block != 0 for block in request.blocks[group])
        whole = -(-request.num_tokens // 4)
        assert live <= WINDOW // 4 + 2 if window else live >= whole - 1
    llm.abort(name)
