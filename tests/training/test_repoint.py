from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from phalanx.distributed.mesh import Mesh
from phalanx.training.engine import TrainingEngine
from phalanx.training.repoint import ELEMENTWISE, check_optimizer, is_elementwise
from tests.training.loops import adamw_in_groups, assert_same, engine_for, engine_loop, mlp, plain_loop, regression
from tests.training.loops import regression_loss as loss_of


class Renamed(torch.optim.AdamW):
    """Keeps its step."""


class Stepping(torch.optim.AdamW):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data -= group["lr"] * parameter.grad / parameter.grad.norm()


def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(2, 2))]


def test_elementwise() -> None:
    for kind in (*ELEMENTWISE, Renamed):
        assert is_elementwise(kind(parameters(), lr=0.1)), kind
    schedule_wraps = torch.optim.SGD(parameters(), lr=0.1)
    torch.optim.lr_scheduler.LambdaLR(schedule_wraps, lambda _: 1.0)
    assert is_elementwise(schedule_wraps)
    assert not is_elementwise(Stepping(parameters(), lr=0.1))
    assert not is_elementwise(torch.optim.LBFGS(parameters()))


@pytest.mark.parametrize(
    "stage, tp_size, named", [(1, 1, "ZeRO stage 1"), (0, 2, "tensor parallelism over 2"), (2, 2, "stage 2 and tensor")]
)
def test_others_are_refused_by_name(stage: int, tp_size: int, named: str) -> None:
    optimizer = torch.optim.Adafactor(parameters())
    with pytest.raises(ValueError, match=named) as refusal:
        check_optimizer(optimizer, stage=stage, tp_size=tp_size, allow_untested=False)
    assert "Adafactor" in str(refusal.value)
    check_optimizer(optimizer, stage=stage, tp_size=tp_size, allow_untested=True)


def test_any_optimizer_sees_whole_parameters_at_stage_0() -> None:
    steps = regression(4, 1)

    def make(model: nn.Module) -> torch.optim.Optimizer:
        return Stepping(model.parameters(), lr=0.1)

    expected = plain_loop(mlp(), make, loss_of, steps)
    assert_same(engine_loop(engine_for(mlp(), make, Mesh.build()), loss_of, steps), expected)


def test_state_of_another_run_is_refused() -> None:
    model = mlp()
    optimizer = adamw_in_groups(model)
    loss_of(model, regression(1, 1)[0][0]).backward()
    optimizer.step()
    with pytest.raises(ValueError, match="already has state for 6 parameters"):
        engine_for(model, lambda _: optimizer, Mesh.build())


def test_parameters_of_another_model_are_refused() -> None:
    stale = adamw_in_groups(mlp())
    with pytest.raises(ValueError, match="6 of 6 tensors that are not parameters of the model"):
        engine_for(mlp(), lambda _: stale, Mesh.build())


def test_what_the_optimizer_does_not_hold_stays(caplog: pytest.LogCaptureFixture) -> None:
    model = mlp()
    first = model[0].weight.detach().clone()
    engine = engine_for(model, lambda m: torch.optim.SGD(m[-1].parameters(), lr=0.1), Mesh.build())
    assert "4 parameters require a gradient but are in no param group of the optimizer, the first is 0.weight" in (
        caplog.text
    )
    engine_loop(engine, loss_of, regression(2, 1))
    assert torch.equal(model[0].weight, first)


def test_without_an_optimizer_the_engine_evaluates() -> None:
    engine = engine_for(mlp(), None, Mesh.build())
    x, y = regression(1, 1)[0][0]
    assert torch.equal(engine.eval()(x), mlp()(x))
    with pytest.raises(RuntimeError, match="no optimizer"):
        engine.backward(loss_of(engine, (x, y)))
    assert isinstance(engine, TrainingEngine) and engine.get_lr() == []
