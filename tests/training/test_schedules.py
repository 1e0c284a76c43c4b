from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from phalanx.config import ConfigError
from phalanx.training.schedules import SCHEDULES, schedule_maker

# What DeepSpeed 0.19.8's own classes set before each of the first 14 steps.
RECORDED = json.loads((Path(__file__).parent / "deepspeed_schedules.json").read_text())


def optimizer(kind=torch.optim.AdamW, **more):
    a, b = (torch.nn.Parameter(torch.zeros(1)) for _ in range(2))
    return kind([{"params": [a]}, {"params": [b], "lr": 5e-3}], lr=1e-3, **more)


@pytest.mark.parametrize("recorded", RECORDED, ids=lambda r: f"{r['type']}-{r['params']}")
def test_rates_are_deepspeeds(recorded):
    held = optimizer()
    schedule = schedule_maker(recorded["type"], recorded["params"])(held)
    for rates, beta in zip(recorded["lr"], recorded["beta1"], strict=True):
        assert [group["lr"] for group in held.param_groups] == pytest.approx(rates, rel=1e-12, abs=1e-18)
        assert held.param_groups[0]["betas"][0] == pytest.approx(beta, rel=1e-12)
        assert schedule.get_last_lr() == [group["lr"] for group in held.param_groups]
        schedule.step()


def test_every_schedule_was_recorded():
    assert {recorded["type"] for recorded in RECORDED} == set(SCHEDULES)


@pytest.mark.parametrize("recorded", RECORDED, ids=lambda r: f"{r['type']}-{r['params']}")
def test_a_loaded_schedule_goes_on_where_it_was(recorded):
    make = schedule_maker(recorded["type"], recorded["params"])
    first = make(optimizer())
    for _ in range(6):
        first.step()
    held = optimizer()
    second = make(held)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for rates in recorded["lr"][6:]:
        assert [group["lr"] for group in held.param_groups] == pytest.approx(rates, rel=1e-12, abs=1e-18)
        second.step()


def test_a_rate_that_is_a_tensor_stays_one():
    rate = torch.tensor(1.0)
    held = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=rate)
    schedule = schedule_maker("WarmupLR", {"warmup_max_lr": 0.5, "warmup_num_steps": 2, "warmup_type": "linear"})(held)
    schedule.step(1)
    assert held.param_groups[0]["lr"] is rate and rate.item() == 0.25


def test_momentum_is_left_alone_without_betas():
    held = optimizer(torch.optim.SGD, momentum=0.7)
    schedule_maker("OneCycle", {"cycle_min_lr": 0.1, "cycle_max_lr": 0.2})(held).step()
    assert held.param_groups[0]["momentum"] == 0.7 and "betas" not in held.param_groups[0]


def test_schedules_of_torch():
    held = optimizer()
    schedule = schedule_maker("StepLR", {"step_size": 1, "gamma": 0.5})(held)
    held.step()
    schedule.step()
    assert held.param_groups[0]["lr"] == 5e-4


@pytest.mark.parametrize(
    ("name", "params", "told"),
    [
        ("WarmupLr", {}, "did you mean WarmupLR"),
        ("Cosine", {}, "WarmupCosineLR"),
        ("LambdaLR", {}, "unknown"),
        ("ReduceLROnPlateau", {}, "unknown"),
        ("WarmupLR", {"warmup_steps": 3}, "scheduler.params.warmup_steps: WarmupLR has no such setting; did you mean"),
        ("WarmupDecayLR", {}, "needs total_num_steps"),
        ("OneCycle", {"cycle_min_lr": 1}, "needs cycle_max_lr"),
    ],
)
def test_what_a_config_cannot_name(name, params, told):
    with pytest.raises(ConfigError, match=r"^scheduler\.") as caught:
        schedule_maker(name, params)
    assert told in str(caught.value)


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("WarmupLR", {"warmup_type": "cubic"}),
        ("WarmupLR", {"warmup_num_steps": 0}),
        ("WarmupLR", {"warmup_num_steps": 1.5}),
        ("WarmupLR", {"warmup_max_lr": [1.0]}),
        ("WarmupDecayLR", {"total_num_steps": "10"}),
        ("WarmupCosineLR", {"total_num_steps": 0}),
        ("LRRangeTest", {"lr_range_test_step_size": 0}),
        ("OneCycle", {"cycle_min_lr": 0.1, "cycle_max_lr": 1, "cycle_first_step_size": 0}),
    ],
)
def test_values_that_do_not_fit(name, params):
    with pytest.raises(ConfigError, match=r"scheduler\.params"):
        schedule_maker(name, params)(optimizer())
