from __future__ import annotations

from typing import Any

import pytest
import torch

from phalanx.training.precision import LossScale, Precision

# Overflows (1) and good steps (0), and the scale after each, worked out by hand from DeepSpeed's rule: hysteresis 2
# lets one overflow pass; the scale doubles when (step - last overflow) is a multiple of the window.
SEQUENCES: list[tuple[dict[str, Any], str, list[float]]] = [
    ({"window": 3, "hysteresis": 1, "patience": 1}, "0001000", [8, 8, 16, 8, 8, 8, 16]),
    ({"window": 3, "hysteresis": 2, "patience": 2}, "11000110", [8, 4, 4, 4, 8, 8, 4, 4]),
    ({"window": 100, "hysteresis": 2, "patience": 2}, "1001", [8, 8, 8, 4]),
    ({"window": 100, "hysteresis": 2, "patience": 2, "consecutive": True}, "1001", [8, 8, 8, 8]),
]


@pytest.mark.parametrize("options, steps, expected", SEQUENCES)
def test_loss_scale(options: dict[str, Any], steps: str, expected: list[float]) -> None:
    scale = LossScale(8.0, guarded=True, dynamic=True, **options)
    seen = []
    for step in steps:
        scale.update(overflow=step == "1")
        again = LossScale(64.0, guarded=True, dynamic=True, **options)
        again.load_state_dict(scale.state_dict())
        assert again == scale
        scale = again
        seen.append(scale.scale)
    assert seen == expected


def test_a_loss_scale_of_another_kind_is_not_taken_over() -> None:
    dynamic, fixed, none = LossScale(8.0, guarded=True, dynamic=True), LossScale(32.0, guarded=True), LossScale()
    for own in (dynamic, fixed, none):
        for other in (dynamic, fixed, none):
            before = own.state_dict()
            own.load_state_dict(other.state_dict())
            assert own.state_dict() == before
    # What the config says stays: the least scale, the overflows that it takes.
    own = LossScale(64.0, guarded=True, dynamic=True, minimum=16.0, hysteresis=1, patience=1)
    own.load_state_dict({**dynamic.state_dict(), "step": 5})
    assert (own.scale, own.patience, own.step) == (16.0, 1, 5)


def test_loss_scale_at_its_minimum() -> None:
    scale = LossScale(2.0, guarded=True, dynamic=True, patience=1, hysteresis=1, minimum=1.0)
    scale.update(overflow=True)
    with pytest.raises(FloatingPointError, match=r"minimum of 1\.0"):
        scale.update(overflow=True)


def test_only_fp16_skips() -> None:
    infinite = torch.tensor(float("inf"))
    assert not LossScale().skips(infinite)
    assert LossScale(8.0, guarded=True).skips(infinite)
    assert not LossScale(8.0, guarded=True).skips(torch.tensor(1.0))
    with pytest.raises(ValueError, match="'scale'"):
        LossScale().load_state_dict({})


def test_gradient_dtype() -> None:
    """Sums that a rank keeps over several passes are fp32; what travels at once stays narrow."""
    one, four = (Precision(torch.bfloat16, passes=passes) for passes in (1, 4))
    assert one.gradient_dtype(torch.float32, held=True) == torch.bfloat16
    assert four.gradient_dtype(torch.float32, held=True) == torch.float32
    assert four.gradient_dtype(torch.float32, held=False) == torch.bfloat16
    assert Precision(passes=4).gradient_dtype(torch.float64, held=True) == torch.float64
