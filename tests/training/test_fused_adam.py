"""FusedAdam as an optimizer: torch's state, hooks and schedules, and which steps are the kernel's."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from phalanx import FusedAdam
from phalanx.distributed.mesh import Mesh
from phalanx.training import fused_adam
from phalanx.training.optimizers import optimizer_maker
from phalanx.training.repoint import is_elementwise
from tests.training.loops import assert_same, engine_for, engine_loop, mlp, plain_loop, regression, regression_loss

pytest.importorskip("triton", reason="triton is not installed")
from phalanx.ops.triton import adam
from tests.ops.triton import interpreter

interpreter.complete()

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SIZES = [(3, 5), (0,), (1,), (1030,)]


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Steps go to the kernel on this device, whatever it is; of each launch the number of parameters."""
    found: list[int] = []
    launch = adam.adam_step

    def counted(rows: list[Any], **settings: Any) -> None:
        found.append(len(rows))
        launch(rows, **settings)

    monkeypatch.setattr(adam, "adam_step", counted)
    monkeypatch.setattr(fused_adam, "_on_gpu", lambda parameter: True)
    return found


def pair(dtype: torch.dtype = torch.float32) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    ours = [nn.Parameter(torch.randn(size, device=DEVICE).to(dtype)) for size in SIZES]
    return ours, [nn.Parameter(parameter.detach().clone()) for parameter in ours]


def give_gradients(*many: list[nn.Parameter]) -> None:
    for alike in zip(*many, strict=True):
        gradient = torch.randn_like(alike[0])
        for parameter in alike:
            parameter.grad = gradient.clone()


def close(ours: list[nn.Parameter], theirs: list[nn.Parameter]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


def make(kind: type[torch.optim.Optimizer], parameters: list[nn.Parameter], **more: Any) -> torch.optim.Optimizer:
    """In two groups, of different decay."""
    groups: list[dict[str, Any]] = [{"params": parameters[:2], "weight_decay": 0.3}, {"params": parameters[2:]}]
    return kind(groups, lr=0.05, weight_decay=0.1, **more)


@pytest.mark.parametrize("decoupled", [True, False])
def test_steps_with_a_schedule(launches: list[int], decoupled: bool) -> None:
    ours, theirs = pair()
    one = make(FusedAdam, ours, adam_w_mode=decoupled)
    other = make(torch.optim.AdamW if decoupled else torch.optim.Adam, theirs)
    schedules = [torch.optim.lr_scheduler.LambdaLR(made, lambda step: 1 / (1 + step)) for made in (one, other)]
    for step in range(5):
        give_gradients(ours, theirs)
        if step == 2:
            ours[0].grad = theirs[0].grad = None
        for made, schedule in zip((one, other), schedules, strict=True):
            made.step()
            schedule.step()
    close(ours, theirs)
    assert [one.state[p]["step"].item() for p in ours] == [other.state[p]["step"].item() for p in theirs]
    assert all(one.state[p]["step"].device.type == "cpu" for p in ours)
    assert sum(launches) == 5 * len(SIZES) - 1
    one.zero_grad()
    assert all(parameter.grad is None for parameter in ours)


def test_dtypes_may_differ(launches: list[int]) -> None:
    ours, _ = pair(torch.bfloat16)
    theirs = [nn.Parameter(parameter.detach().float()) for parameter in ours]
    one, other = make(FusedAdam, ours), make(torch.optim.AdamW, theirs)
    give_gradients(ours)
    for parameter, wide in zip(ours, theirs, strict=True):
        wide.grad = parameter.grad.float()
    one.step()
    other.step()
    assert sum(launches) == len(SIZES) and one.state[ours[0]]["exp_avg"].dtype == torch.bfloat16
    for parameter, wide in zip(ours, theirs, strict=True):
        torch.testing.assert_close(parameter.float(), wide, rtol=2.0**-7, atol=1e-6)


@pytest.mark.parametrize("decoupled", [True, False])
def test_each_loads_what_the_other_saved(launches: list[int], decoupled: bool) -> None:
    ours, theirs = pair()
    torchs = torch.optim.AdamW if decoupled else torch.optim.Adam
    makers = [lambda p: make(FusedAdam, p, adam_w_mode=decoupled), lambda p: make(torchs, p)]
    one, other = makers[0](ours), makers[1](theirs)
    for step in range(4):
        give_gradients(ours, theirs)
        one.step()
        other.step()
        if step == 1:
            states = []
            for made in (one, other):
                file = io.BytesIO()
                torch.save(made.state_dict(), file)
                file.seek(0)
                states.append(torch.load(file, weights_only=True))
            assert states[0].keys() == states[1].keys()
            assert states[0]["state"][0].keys() == states[1]["state"][0].keys()
            assert [group.keys() for group in states[0]["param_groups"]] == [
                group.keys() for group in states[1]["param_groups"]
            ]
            one, other = makers[1](ours), makers[0](theirs)
            one.load_state_dict(states[0])
            other.load_state_dict(states[1])
    close(ours, theirs)
    assert sum(launches) == 4 * len(SIZES)


def test_the_state_of_torchs_fused_step(launches: list[int]) -> None:
    """Which keeps its counts beside the parameters."""
    ours, theirs = pair()
    other = torch.optim.AdamW(theirs, lr=0.05, fused=True)
    give_gradients(theirs)
    other.step()
    one = FusedAdam(ours, lr=0.05)
    one.load_state_dict(copy.deepcopy(other.state_dict()))
    assert {state["step"].device.type for state in one.state.values()} == {"cpu"}
    assert not one.param_groups[0]["fused"]
    for parameter, wanted in zip(ours, theirs, strict=True):
        parameter.data.copy_(wanted.detach())
    give_gradients(ours, theirs)
    one.step()
    other.step()
    close(ours, theirs)
    assert sum(launches) == len(SIZES)


def test_a_copy_goes_on(launches: list[int]) -> None:
    ours, _ = pair()
    one = FusedAdam(ours, lr=0.05, adam_w_mode=False)
    copied = copy.deepcopy(one)
    give_gradients(copied.param_groups[0]["params"])
    copied.step()
    assert not copied.param_groups[0]["decoupled_weight_decay"] and sum(launches) == len(SIZES)


def test_a_group_keeps_its_weight_decay(launches: list[int]) -> None:
    ours, theirs = pair()
    one = FusedAdam([{"params": ours[:1], "decoupled_weight_decay": False}, {"params": ours[1:]}])
    file = io.BytesIO()
    torch.save(one, file)
    file.seek(0)
    one.load_state_dict(torch.optim.AdamW([{"params": theirs[:1]}, {"params": theirs[1:]}]).state_dict())
    for made in (one, copy.deepcopy(one), torch.load(file, weights_only=False)):
        assert [group["decoupled_weight_decay"] for group in made.param_groups] == [False, True]


def test_a_closure_and_hooks(launches: list[int]) -> None:
    """Run once, also where the step is torch's."""
    # torch puts hooks around the step of a class once an instance of it was made.
    torch.optim.AdamW([nn.Parameter(torch.ones(1))])
    for slow in (False, True):
        weight = nn.Parameter(torch.ones(4, dtype=torch.float64 if slow else torch.float32, device=DEVICE))
        one = FusedAdam([weight], lr=0.1)
        told: list[str] = []
        one.register_step_pre_hook(lambda *_, told=told: told.append("before"))
        one.register_step_post_hook(lambda *_, told=told: told.append("after"))

        def closure(one: FusedAdam = one, weight: nn.Parameter = weight) -> torch.Tensor:
            one.zero_grad()
            loss = weight.square().sum()
            loss.backward()
            return loss

        assert one.step(closure).item() == 4.0
        assert told == ["before", "after"]
        torch.testing.assert_close(weight.detach(), torch.full_like(weight, 0.9))
        assert one.state[weight]["step"].item() == 1.0
    assert launches == [1]


def test_a_graph_of_the_old_values_is_not_walked(launches: list[int]) -> None:
    weight = nn.Parameter(torch.ones(4, device=DEVICE))
    one = FusedAdam([weight], lr=0.1)
    loss = weight.square().sum()
    loss.backward(retain_graph=True)
    one.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    assert launches == [1]


@pytest.mark.parametrize("case", ["float64", "complex", "not contiguous", "maximize", "of another kind", "mixed"])
def test_what_the_kernel_is_not_for_is_torchs(launches: list[int], case: str) -> None:
    class Kind(torch.Tensor):
        pass

    start = {
        "float64": torch.randn(4, dtype=torch.float64),
        "complex": torch.randn(4, dtype=torch.complex64),
        "not contiguous": torch.randn(4, 3).T,
        "of another kind": torch.randn(4).as_subclass(Kind),
    }.get(case, torch.randn(4))
    ours = [nn.Parameter(start.clone()), nn.Parameter(torch.ones(2, dtype=torch.float64 if case == "mixed" else None))]
    theirs = [nn.Parameter(parameter.detach().clone()) for parameter in ours]
    more = {"maximize": True} if case == "maximize" else {}
    one = FusedAdam([{"params": ours, **more}], lr=0.1, weight_decay=0.1)
    other = torch.optim.AdamW([{"params": theirs, **more}], lr=0.1, weight_decay=0.1)
    for _ in range(3):
        give_gradients(ours, theirs)
        one.step()
        other.step()
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True)) and launches == []


def test_on_a_cpu_it_is_torchs() -> None:
    ours, theirs = ([nn.Parameter(p.detach().cpu()) for p in many] for many in pair())
    one, other = make(FusedAdam, ours), make(torch.optim.AdamW, theirs)
    give_gradients(ours, theirs)
    one.step()
    other.step()
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_a_rate_that_is_a_tensor(launches: list[int]) -> None:
    ours, theirs = pair()
    one = FusedAdam(ours, lr=torch.tensor(0.25), weight_decay=0.0)
    other = torch.optim.AdamW(theirs, lr=0.25, weight_decay=0.0)
    give_gradients(ours, theirs)
    one.step()
    other.step()
    close(ours, theirs)
    assert sum(launches) == len(SIZES)


def test_settings_of_the_whole_are_refused_in_a_group() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    with pytest.raises(ValueError, match="a param group with bias_correction: these are settings of FusedAdam as a"):
        FusedAdam([{"params": [weight], "bias_correction": False}])
    with pytest.raises(ValueError, match="adam_w_mode is 'false': expected True or False"):
        FusedAdam([weight], adam_w_mode="false")


@pytest.mark.parametrize("option", [{"bias_correction": False}, {"amsgrad": True}, {"set_grad_none": False}])
def test_what_is_not_implemented_is_refused(option: dict[str, bool]) -> None:
    (name, value), *_ = option.items()
    with pytest.raises(ValueError, match=f"^{name}={value}: "):
        FusedAdam([nn.Parameter(torch.ones(1))], **option)


def test_the_configs_adam_is_it() -> None:
    weight = [nn.Parameter(torch.ones(1))]
    made = optimizer_maker("AdamW", {"lr": 0.5, "weight_decay": 0.1})(weight)
    assert type(made) is FusedAdam and made.defaults["decoupled_weight_decay"] and is_elementwise(made)
    made = optimizer_maker("Adam", {"adam_w_mode": False})(weight)
    assert type(made) is FusedAdam and not made.defaults["decoupled_weight_decay"]


@pytest.mark.parametrize("first", [FusedAdam, torch.optim.AdamW])
def test_a_checkpoint_goes_from_one_to_the_other(tmp_path: Path, first: type[torch.optim.Optimizer]) -> None:
    kinds = [FusedAdam, torch.optim.AdamW]
    second = kinds[1 - kinds.index(first)]
    steps = regression(4, 1)

    def maker(kind: type[torch.optim.Optimizer]) -> Any:
        return lambda model: kind(model.parameters(), lr=0.01, weight_decay=0.1)

    expected = plain_loop(mlp(), maker(torch.optim.AdamW), regression_loss, steps)
    engine = engine_for(mlp(), maker(first), Mesh.build(), stage=1)
    engine_loop(engine, regression_loss, steps[:2])
    engine.save_checkpoint(str(tmp_path), tag="half")
    engine.destroy()
    engine = engine_for(mlp(), maker(second), Mesh.build(), stage=1)
    engine.load_checkpoint(str(tmp_path), tag="half")
    del expected.losses[:2], expected.norms[:2]
    assert_same(engine_loop(engine, regression_loss, steps[2:]), expected)
    engine.destroy()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_torchs_fused_step_on_a_gpu(dtype: torch.dtype) -> None:
    ours, theirs = pair(dtype)
    one, other = make(FusedAdam, ours), make(torch.optim.AdamW, theirs, fused=True)
    for _ in range(5):
        give_gradients(ours, theirs)
        one.step()
        other.step()
        for a, b in zip(ours, theirs, strict=True):
            coarse = 2e-6 if dtype == torch.float32 else 2.0**-7
            torch.testing.assert_close(a, b, rtol=coarse, atol=coarse)
            b.data.copy_(a.detach())
