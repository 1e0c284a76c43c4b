"""`phalanx check` finds what was planted, and where."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from phalanx.engine.check import check_model, random_reference
from phalanx.models import POLICIES, InferencePolicy, TransformerModel, load_families
from phalanx.models.base import bias_of
from phalanx.models.hf_config import HFConfig
from phalanx.models.llama import LlamaLayer, LlamaOuter
from phalanx.models.rope import RopeSettings

CONFIG = {
    "model_type": "llama",
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 512,
    "intermediate_size": 700,
    "num_hidden_layers": 6,
    "vocab_size": 1000,
    "mlp_bias": True,
}
IDS = [3, 14, 15, 9, 26, 5, 35, 8, 9, 7, 9, 3, 23]


class Swapped(LlamaLayer):
    PARAM_MAPPING = {  # noqa: RUF012
        "mlp.gate_proj.weight": "mlp_1.up_params",
        "mlp.up_proj.weight": "mlp_1.gate_params",
    }


class OtherBase(TransformerModel):
    @property
    def rope(self) -> RopeSettings | None:
        settings = super().rope
        assert settings is not None
        return replace(settings, theta=settings.theta * 3)


class NoBias(TransformerModel):
    def forward_mlp(self, layer: int, hidden: Tensor) -> Tensor:
        parameters = self.layers[layer]
        if layer == 0:
            return super().forward_mlp(layer, hidden)
        inner = self.activate(self.mlp_1(hidden, parameters.mlp_1), self.activation)
        return self.mlp_2(inner, parameters.mlp_2, bias_of(parameters, "mlp_2"))


def policy(layer: type = LlamaLayer, model: type = TransformerModel) -> type[InferencePolicy]:
    class Planted(InferencePolicy):
        model_class = model
        layer_container = layer
        outer_container = LlamaOuter

    return Planted


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    folder = tmp_path_factory.mktemp("reference")
    model = random_reference(HFConfig(CONFIG))
    model.save_pretrained(folder)
    return model, folder


def test_a_right_model_is_equal_everywhere(reference: tuple[Any, Path]) -> None:
    model, folder = reference
    found = check_model(model, str(folder), IDS)
    assert [(each.tp, each.given) for each in found] == [
        (tp, given) for tp in (1, 2) for given in ("one shot", "in pieces", "token by token")
    ]
    assert all(each.first is None for each in found)
    assert {point.point for point in found[0].points} == {
        *(f"layer {i}: {part}" for i in (0, 1) for part in ("attention", "mlp", "output")),
        "logits",
    }
    assert sum(p.numel() for p in model.parameters()) < 100_000


@pytest.mark.parametrize(
    ("planted", "point"),
    [
        (policy(layer=Swapped), "layer 0: mlp"),
        (policy(model=OtherBase), "layer 0: attention"),
        (policy(model=NoBias), "layer 1: mlp"),
    ],
    ids=["gate and up swapped", "rope of another base", "a bias left out"],
)
def test_a_planted_fault_is_found_where_it_is(
    planted: type, point: str, reference: tuple[Any, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    load_families()
    monkeypatch.setitem(POLICIES, "llama", planted)
    model, folder = reference
    for each in check_model(model, str(folder), IDS, tp_sizes=(1, 2)):
        assert each.first is not None
        assert each.first.point == point
        assert each.first.relative > 1e-3


def test_not_a_number_is_a_difference(reference: tuple[Any, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(TransformerModel):
        def forward_attention(self, *args: Any) -> Tensor:
            return torch.full_like(super().forward_attention(*args), float("nan"))

    load_families()
    monkeypatch.setitem(POLICIES, "llama", policy(model=Broken))
    model, folder = reference
    assert check_model(model, str(folder), IDS, tp_sizes=(1,))[0].first.point == "layer 0: attention"  # type: ignore[union-attr]
