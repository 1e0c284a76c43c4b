"""What ``quantization`` does to the weights of a model, and where it is refused."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from phalanx.config import ConfigError, engine_config
from phalanx.distributed.group import SoloGroup
from phalanx.engine.build import build_engine
from phalanx.engine.inference_engine import InferenceEngine
from phalanx.layout.partition import Block, Partition
from phalanx.models.experts import Experts
from phalanx.models.layers import Embedding, Linear, PreparedParameter, Unembedding, as_prepared
from phalanx.models.placement import Placement
from phalanx.ops import quantized
from phalanx.ops.linear import linear, restore_weight
from phalanx.ops.quantized import LAYOUTS, quantize_int8
from phalanx.weights import WeightError
from tests.models.tiny import llama, llama_config

IDS = [3, 4, 5, 6, 7, 8]
SETTINGS: dict[str, Any] = {"num_blocks": 8, "max_model_len": 32}
CPU = torch.device("cpu")


class Rank(SoloGroup):
    """The first of two ranks, without the other."""

    size = 2


def placement(quantization: str | None, group: SoloGroup | None = None, **forced: str) -> Placement:
    return Placement(group or SoloGroup(), CPU, torch.float32, forced, quantization)


def placed(
    quantization: str, hidden_size: int, group: SoloGroup | None = None, device: torch.device = CPU
) -> Placement:
    """As an engine places a model of this hidden size."""
    settings = engine_config(quantization=quantization)
    return Placement.of(settings, group or SoloGroup(), device, torch.bfloat16, hidden_size)


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
    narrow = Placement(SoloGroup(), CPU, torch.float32, {}, "fp8", hidden_size=64)
    with pytest.raises(ValueError, match="quantization='fp8' is not there for models with experts"):
        Experts(narrow, 2, 1, True, 64, 64, True, lambda x: x)
    with pytest.raises(ConfigError, match="quantization"):
        engine_config(quantization="int3")


def test_fp8_of_a_narrow_model_is_of_weights_alone(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "phalanx")
    for group in (SoloGroup(), Rank()):
        assert placed("fp8", 2048, group).quantization == "fp8"
        assert placed("int8", 64, group).quantization == "int8"
    assert not caplog.messages
    assert placed("fp8", 2047).quantization == "fp8_weights"
    assert ["quantises weights alone, as 'fp8_weights'" in message for message in caplog.messages] == [True]


def test_rows_are_left_in_e4m3_only_for_products_that_read_them() -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    import phalanx.ops.triton  # noqa: F401

    device = torch.device("cuda")
    assert set(placed("fp8", 4096, device=device).forced) == {"rms_norm", "add_rms_norm", "gated_activation"}
    assert not placed("fp8", 1024, device=device).forced
    assert not placed("fp8_weights", 4096, device=device).forced


@pytest.fixture(scope="module")
def small_llama() -> Any:
    """Widths that int4 takes."""
    return llama(llama_config(hidden_size=64, intermediate_size=128, num_attention_heads=4, num_key_value_heads=2))


def layouts(engine: InferenceEngine) -> set[str]:
    """Of the projections of the first layer."""
    return {engine.model.layers[0].finalized()[name].layout for name in ("qkv", "attn_out", "mlp_1", "mlp_2")}


@pytest.mark.parametrize(
    ("quantization", "layout"),
    [("fp8", "fp8_weights"), ("fp8_weights", "fp8_weights"), ("int8", "int8"), ("int4", "int4")],
)
def test_a_quantised_model_answers_nearly_the_same_and_is_saved_as_it_is(
    quantization: str, layout: str, small_llama: Any, tmp_path: Path
) -> None:
    plain = build_engine(small_llama, **SETTINGS).put([0], [IDS])
    engine = build_engine(small_llama, quantization=quantization, **SETTINGS)
    found = engine.put([0], [IDS])
    assert layouts(engine) == {layout}
    assert engine.model.outer.word_emb.layout not in LAYOUTS
    assert 0 < float((found - plain).norm() / plain.norm()) < 0.3
    engine.serialize(str(tmp_path))
    for same in (None, quantization, layout):
        assert torch.equal(build_engine(tmp_path, quantization=same, **SETTINGS).put([0], [IDS]), found)
    other = next(name for name in ("int8", "int4") if name != layout)
    with pytest.raises(
        WeightError, match=f"serialised with quantization='{layout}', this engine has quantization='{other}'"
    ):
        build_engine(tmp_path, quantization=other, **SETTINGS)


def test_a_narrow_model_that_was_saved_with_fp8_activations_is_served_as_it_was_written(
    small_llama: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as before:
        before.setattr(quantized, "NARROW", 0)
        engine = build_engine(small_llama, quantization="fp8", **SETTINGS)
    assert layouts(engine) == {"fp8"}
    engine.serialize(str(tmp_path))
    assert torch.equal(build_engine(tmp_path, **SETTINGS).put([0], [IDS]), engine.put([0], [IDS]))
    with pytest.raises(WeightError, match="serialised with quantization='fp8', this engine has quantization='fp8_weig"):
        build_engine(tmp_path, quantization="fp8", **SETTINGS)


def test_fp8_of_a_wide_model_quantises_activations_too() -> None:
    sizes = {"hidden_size": 2048, "intermediate_size": 64, "num_hidden_layers": 1, "head_dim": 16}
    wide = llama(llama_config(**sizes))
    plain = build_engine(wide, **SETTINGS).put([0], [IDS])
    engine = build_engine(wide, quantization="fp8", **SETTINGS)
    assert layouts(engine) == {"fp8"}
    weights_alone = build_engine(wide, quantization="fp8_weights", **SETTINGS).put([0], [IDS])
    both, alone = (float((found - plain).norm() / plain.norm()) for found in (engine.put([0], [IDS]), weights_alone))
    assert 0 < alone < both < 0.3


def test_batch_invariance_is_refused_where_a_gpu_does_not_keep_it() -> None:
    on_gpu: Any = SimpleNamespace(quantization=None, batch_invariant=True, device=torch.device("cuda"))
    with pytest.raises(ValueError, match="batch_invariant is not there for models with experts on a GPU"):
        Experts(on_gpu, 2, 1, True, 64, 64, True, lambda x: x)
