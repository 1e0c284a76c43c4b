"""A user registers an implementation of an op, or forces one, by `EngineConfig(ops=...)`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from phalanx.engine.build import build_engine
from phalanx.ops import registry
from phalanx.ops.linear import PlainLinear, PreparedWeight
from tests.models.tiny import error, reference

IDS = [3, 4, 5, 6, 7]


class Counting:
    """An implementation that runs the reference and counts."""

    def __init__(self, op: str) -> None:
        self.calls = 0
        self._reference = next(i.function for i in registry.implementations(op) if i.name == "reference")

    def __call__(self, *args: Any, **settings: Any) -> Any:
        self.calls += 1
        return self._reference(*args, **settings)


class Transposed(PlainLinear):
    """A layout of one's own: the weight transposed."""

    def prepare(self, weight: Tensor) -> PreparedWeight:
        out_features, in_features = weight.shape
        return PreparedWeight(weight.T.contiguous(), "transposed", out_features, in_features, weight.dtype)

    def apply(self, x: Tensor, weight: PreparedWeight, bias: Tensor | None) -> Tensor:
        return x @ weight.data if bias is None else x @ weight.data + bias

    def lookup(self, weight: PreparedWeight, ids: Tensor) -> Tensor:
        return weight.data.T[ids]

    def restore(self, weight: PreparedWeight) -> Tensor:
        return weight.data.T.contiguous()


OPS = ("attention", "rope_write_kv", "rms_norm", "add_rms_norm", "gated_activation")


@pytest.fixture
def mine() -> Iterator[dict[str, Counting]]:
    """An implementation called "mine" of every op of a Llama, never chosen by itself."""
    made = {op: Counting(op) for op in OPS}
    for op, function in made.items():
        registry.register(op, "mine", function, priority=-1)
    registry.register("linear", "transposed", Transposed(), priority=-1)
    yield made
    for op in OPS:
        registry.unregister(op, "mine")
    registry.unregister("linear", "transposed")


@pytest.mark.parametrize("op", OPS)
def test_one_op_is_forced(op: str, mine: dict[str, Counting], tiny_llama: Any) -> None:
    engine = build_engine(tiny_llama, ops={op: "mine"}, num_blocks=8)
    found = engine.put([0], [IDS], logits="all")
    assert error(found, reference(tiny_llama, IDS, [len(IDS)])) < 1e-4
    assert {name for name, function in mine.items() if function.calls} == {op}


def test_none_is_forced(mine: dict[str, Counting], tiny_llama: Any) -> None:
    build_engine(tiny_llama, num_blocks=8).put([0], [IDS])
    assert not any(function.calls for function in mine.values())


@pytest.mark.parametrize("tied", [True, False])
def test_a_layout_of_ones_own(tied: bool, mine: dict[str, Counting], tiny_llama: Any) -> None:
    config = {**tiny_llama.config.to_dict(), "tie_word_embeddings": tied}
    engine = build_engine(tiny_llama, hf_config=config, ops={"linear": "transposed"}, num_blocks=8)
    plain = build_engine(tiny_llama, hf_config=config, ops={"linear": "plain"}, num_blocks=8)
    assert engine.model.layers[0].mlp_2.layout == "transposed" and engine.model.layers[0].mlp_2.shape == (48, 70)
    assert error(engine.put([0], [IDS]), plain.put([0], [IDS])) < 1e-4


@pytest.mark.parametrize(
    ("ops", "message"),
    [
        ({"atention": "reference"}, "unknown op 'atention'; registered ops: .*attention"),
        ({"attention": "flash9"}, "attention: no implementation named 'flash9'; choose one of: .*reference"),
        ({"linear": "narrow"}, "linear: 'narrow' does not support torch.float32 on cpu; those that do: .*plain"),
    ],
)
def test_what_cannot_be_forced_is_refused_by_name(ops: dict[str, str], message: str, tiny_llama: Any) -> None:
    registry.register("linear", "narrow", PlainLinear(), supports=lambda device, dtype: dtype == torch.bfloat16)
    try:
        with pytest.raises(ValueError, match=message):
            build_engine(tiny_llama, device="cpu", ops=ops, num_blocks=8)
    finally:
        registry.unregister("linear", "narrow")
