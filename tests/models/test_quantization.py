"""What ``quantization`` does to the weights of a model, and where it is refused."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from phalanx.config import ConfigError, engine_config
from phalanx.distributed.group import SoloGroup
from phalanx.engine.build import build_engine
from phalanx.layout.partition import Block, Partition
from phalanx.models.experts import Experts
from phalanx.models.layers import Embedding, Linear, PreparedParameter, Unembedding, as_prepared
from phalanx.models.placement import Placement
from phalanx.ops.linear import linear, restore_weight
from phalanx.ops.quantized import LAYOUTS, quantize_int8
from phalanx.weights import WeightError
from tests.models.tiny import llama, llama_config

IDS = [3, 4, 5, 6, 7, 8]
CPU = torch.device("cpu")


class Rank(SoloGroup):
    """The first of two ranks, without the other."""

    size = 2


def placement(quantization: str | None, group: SoloGroup | None = None, **forced: str) -> Placement:
    return Placement(group or SoloGroup(), CPU, torch.float32, forced, quantization)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_projections_are_quantised_and_nothing_else(layout: str) -> None:
    place = placement(layout)
    projection = Linear(place, Partition.column((Block(32), Block(32))), 64, 64)
    weight = torch.randn(64, 64)
    served = projection.transform(list(weight.chunk(2)))
    assert isinstance(served, PreparedParameter) and served.layout == layout and served.shape == (64, 64)
    x = torch.randn(3, 64)
    torch.testing.assert_close(projection(x, served), linear(x, as_prepared(served)))
    assert float((projection(x, served) - x @ weight.T).norm() / (x @ weight.T).norm()) < 0.2
    bias = projection.transform(torch.randn(64))
    assert bias is not None and bias.dtype == torch.float32
    for table in (Embedding(place, 80, 64, tied=True), Unembedding(place, 80, 64)):
        whole = torch.randn(80, 64)
        kept = table.transform(whole)
        assert kept.layout not in LAYOUTS and torch.equal(restore_weight(as_prepared(kept)), whole)


def test_a_rank_quantises_what_it_holds() -> None:
    weight = torch.randn(32, 128)
    served = Linear(placement("int8", Rank()), Partition.row((Block(128),)), 128, 32).transform(weight)
    assert served is not None
    numbers, scale = quantize_int8(weight[:, :64])
    assert torch.equal(served.data, numbers) and torch.equal(served.aux["scale"], scale)


def test_a_cut_that_no_group_divides() -> None:
    weight: Tensor = torch.randn(32, 192)
    row = Partition.row((Block(192),))
    assert Linear(placement("int4"), row, 192, 32).transform(weight) is not None
    with pytest.raises(
        ValueError, match="inputs on a rank are a multiple of 64; this one has 96: use quantization='int8'"
    ):
        Linear(placement("int4", Rank()), row, 192, 32).transform(weight)


def test_refusals() -> None:
    with pytest.raises(ValueError, match=r"quantization='fp8' chooses the linear layers.*'plain' too"):
        placement("fp8", linear="plain")
    with pytest.raises(ValueError, match="linear='int8' would quantise every weight: use quantization"):
        placement(None, linear="int8")
    with pytest.raises(ValueError, match="quantization='int4' is not there for models with experts"):
        Experts(placement("int4"), 2, 1, True, 64, 64, True, lambda x: x)
    with pytest.raises(ConfigError, match="quantization"):
        engine_config(quantization="int3")


@pytest.fixture(scope="module")
def small_llama() -> Any:
    """Widths that int4 takes."""
    return llama(llama_config(hidden_size=64, intermediate_size=128, num_attention_heads=4, num_key_value_heads=2))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_quantised_model_answers_nearly_the_same_and_is_saved_as_it_is(
    layout: str, small_llama: Any, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"num_blocks": 8, "max_model_len": 32}
    plain = build_engine(small_llama, **settings).put([0], [IDS])
    engine = build_engine(small_llama, quantization=layout, **settings)
    found = engine.put([0], [IDS])
    assert {engine.model.layers[0].finalized()[n].layout for n in ("qkv", "attn_out", "mlp_1", "mlp_2")} == {layout}
    assert engine.model.outer.word_emb.layout not in LAYOUTS
    assert 0 < float((found - plain).norm() / plain.norm()) < 0.3
    engine.serialize(str(tmp_path))
    assert torch.equal(build_engine(tmp_path, **settings).put([0], [IDS]), found)
    assert torch.equal(build_engine(tmp_path, quantization=layout, **settings).put([0], [IDS]), found)
    other = next(name for name in LAYOUTS if name != layout)
    with pytest.raises(
        WeightError, match=f"serialised with quantization='{layout}', this engine has quantization='{other}'"
    ):
        build_engine(tmp_path, quantization=other, **settings)


def test_batch_invariance_is_refused_where_a_gpu_does_not_keep_it() -> None:
    on_gpu: Any = SimpleNamespace(quantization=None, batch_invariant=True, device=torch.device("cuda"))
    with pytest.raises(ValueError, match="batch_invariant is not there for models with experts on a GPU"):
        Experts(on_gpu, 2, 1, True, 64, 64, True, lambda x: x)
