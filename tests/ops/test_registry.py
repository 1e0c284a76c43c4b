"""Choosing implementations: by device, dtype, priority or name; errors that name the choices."""

from __future__ import annotations

import pytest
import torch

from phalanx.ops import registry


@pytest.fixture
def op():
    """An op of our own with two implementations, gone afterwards."""
    registry.register("double", "plain", lambda x: 2 * x)
    registry.register(
        "double", "fast", lambda x: x + x, supports=lambda device, dtype: dtype == torch.float32, priority=5
    )
    yield "double"
    registry._TABLE.pop("double")


def name_of(op, function):
    return next(i.name for i in registry.implementations(op) if i.function is function)


def test_the_highest_priority_that_supports(op):
    assert name_of(op, registry.select(op, device="cpu", dtype=torch.float32)) == "fast"
    assert name_of(op, registry.select(op, device=torch.device("cpu"), dtype=torch.float16)) == "plain"
    assert name_of(op, registry.select(op, device="cpu", dtype=torch.float32, forced="plain")) == "plain"


def test_a_user_adds_replaces_and_removes(op):
    assert registry.select(op, device="cpu", dtype=torch.float32)(3) == 6
    registry.register(op, "mine", lambda x: "mine", priority=9)
    assert registry.select(op, device="cpu", dtype=torch.float32)(3) == "mine"
    registry.register(op, "mine", lambda x: "again", priority=9)
    assert registry.select(op, device="cpu", dtype=torch.float32)(3) == "again"
    registry.unregister(op, "mine")
    assert name_of(op, registry.select(op, device="cpu", dtype=torch.float32)) == "fast"


def test_only_an_implementation_with_the_features_that_are_needed(op):
    needs = frozenset({"halves"})
    with pytest.raises(
        ValueError, match=r"nothing supports torch\.float32 on cpu with halves; registered: plain, fast"
    ):
        registry.select(op, device="cpu", dtype=torch.float32, needs=needs)
    registry.register(op, "plain", lambda x, halves=0: 2 * x + halves / 2, features=("halves",))
    assert name_of(op, registry.select(op, device="cpu", dtype=torch.float32, needs=needs)) == "plain"
    assert name_of(op, registry.select(op, device="cpu", dtype=torch.float32)) == "fast"
    with pytest.raises(ValueError, match=r"'fast' does not support .* with halves; those that do: plain"):
        registry.select(op, device="cpu", dtype=torch.float32, forced="fast", needs=needs)


def test_errors_name_the_choices(op):
    with pytest.raises(ValueError, match=r"unknown op 'attentoin'.*attention"):
        registry.select("attentoin", device="cpu", dtype=torch.float32)
    with pytest.raises(ValueError, match="no implementation named 'slow'; choose one of: plain, fast"):
        registry.select(op, device="cpu", dtype=torch.float32, forced="slow")
    with pytest.raises(ValueError, match=r"'fast' does not support torch.float16 on cpu; those that do: plain"):
        registry.select(op, device="cpu", dtype=torch.float16, forced="fast")
    with pytest.raises(ValueError, match="no implementation named"):
        registry.unregister(op, "slow")
    registry.unregister(op, "plain")
    with pytest.raises(ValueError, match=r"nothing supports torch.float16 on cpu; registered: fast"):
        registry.select(op, device="cpu", dtype=torch.float16)
