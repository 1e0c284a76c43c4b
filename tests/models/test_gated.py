"""Where a product makes its gated activation itself, and where something else must come between."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from phalanx.engine.build import build_engine
from phalanx.engine.inference_engine import InferenceEngine
from phalanx.models.layers import Linear
from phalanx.ops.activation import reference_gated_activation
from phalanx.ops.linear import PlainLinear, PreparedWeight
from tests.models.tiny import error, llama, llama_config, reference

IDS = [3, 4, 5, 6, 7]


class GatingLinear(PlainLinear):
    """Says how often it was asked."""

    asked = 0

    def apply_gated(self, x: Tensor, weight: PreparedWeight, bias: Tensor | None, activation: str) -> Tensor | None:
        self.asked += 1
        return reference_gated_activation(self.apply(x, weight, bias), activation) if len(x) == 1 else None


class Doubled(Linear):
    def __call__(self, *args: Any) -> Tensor:
        return 2 * super().__call__(*args)


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> GatingLinear:
    gating = GatingLinear()
    monkeypatch.setattr(PreparedWeight, "backend", gating)
    return gating


def built(model: Any, **settings: Any) -> InferenceEngine:
    return build_engine(model, num_blocks=8, ops={"linear": "plain", **settings})


def test_a_row_alone_is_gated_at_once(backend: GatingLinear) -> None:
    model = llama(llama_config())
    engine = built(model)
    assert error(engine.put([0], [IDS]), reference(model, IDS, [len(IDS)])[-1:]) < 1e-5 and backend.asked == 2
    assert error(engine.put([0], [[9]]), reference(model, [*IDS, 9], [6])[-1:]) < 1e-5 and backend.asked == 4


def another_activation(engine: InferenceEngine) -> None:
    given = engine.model.activate
    engine.model.activate = lambda x, name: 2 * given(x, name)


def another_product(engine: InferenceEngine) -> None:
    plain = engine.model.mlp_1
    engine.model.mlp_1 = Doubled(plain.placement, plain.partition, plain.in_features, plain.out_features)


def another_module(engine: InferenceEngine) -> None:
    plain = engine.model.mlp_1
    engine.model.mlp_1 = lambda *args: 2 * plain(*args)


BOTH = ("up_proj", "gate_proj")


@pytest.mark.parametrize(
    ("change", "weights"), [(another_activation, ("up_proj",)), (another_product, BOTH), (another_module, BOTH)]
)
def test_what_a_family_puts_between_stays(
    backend: GatingLinear, change: Callable[[InferenceEngine], None], weights: tuple[str, ...]
) -> None:
    model = llama(llama_config())
    engine = built(model)
    change(engine)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if any(part in name for part in weights):
                parameter *= 2
    assert error(engine.put([0], [[9]]), reference(model, [9], [1])) < 1e-5 and backend.asked == 0


def test_a_forced_activation_is_the_one_that_runs(backend: GatingLinear) -> None:
    built(llama(llama_config()), gated_activation="reference").put([0], [[9]])
    assert backend.asked == 0
