from __future__ import annotations

import math

import pytest
import torch
from torch import optim

from phalanx.config import ConfigError
from phalanx.training.optimizers import optimizer_maker
from phalanx.training.repoint import ELEMENTWISE


def weight(value=1.0):
    return torch.nn.Parameter(torch.tensor([value], dtype=torch.float64))


def run(name, params, steps=3):
    """A weight of 1 after some steps with gradients 0.5, 1.0, 1.5, ..."""
    w = weight()
    made = optimizer_maker(name, params)([w])
    for step in range(1, steps + 1):
        w.grad = torch.full_like(w, 0.5 * step)
        made.step()
    return w.item()


def fused_adam(steps=3, lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, decay=0.0, decoupled=True):
    """The update that DeepSpeed's FusedAdam documents, in plain numbers."""
    w, m, v = 1.0, 0.0, 0.0
    for step in range(1, steps + 1):
        grad = 0.5 * step + (0.0 if decoupled else decay * w)
        m = beta1 * m + (1 - beta1) * grad
        v = beta2 * v + (1 - beta2) * grad * grad
        update = (m / (1 - beta1**step)) / (math.sqrt(v / (1 - beta2**step)) + eps)
        w -= lr * (update + (decay * w if decoupled else 0.0))
    return w


@pytest.mark.parametrize("name", ["Adam", "adam", "AdamW", "adamw"])
def test_adam_and_adamw_are_the_same(name):
    assert run(name, {"lr": 0.1, "weight_decay": 0.3}) == pytest.approx(fused_adam(lr=0.1, decay=0.3), rel=1e-12)


@pytest.mark.parametrize("name", ["Adam", "AdamW"])
def test_no_weight_decay_by_default(name):
    assert run(name, {}) == pytest.approx(fused_adam(), rel=1e-12)


def test_adam_w_mode():
    coupled = fused_adam(lr=0.1, decay=0.3, decoupled=False)
    off = {"lr": 0.1, "weight_decay": 0.3, "adam_w_mode": False}
    assert run("Adam", off) == pytest.approx(coupled, rel=1e-12)
    # AdamW does not listen to it.
    assert run("AdamW", off) == pytest.approx(fused_adam(lr=0.1, decay=0.3), rel=1e-12)


def test_torch_adam_has_torchs_defaults():
    made = optimizer_maker("Adam", {"torch_adam": True})([weight()])
    assert type(made) is optim.AdamW and made.defaults["weight_decay"] == 0.01
    made = optimizer_maker("Adam", {"torch_adam": True, "adam_w_mode": False, "amsgrad": True})([weight()])
    assert type(made) is optim.Adam and made.defaults["amsgrad"]


def test_the_caller_keeps_what_it_gave():
    params = {"lr": 0.1, "betas": [0.8, 0.9], "torch_adam": False, "adam_w_mode": True}
    made = optimizer_maker("Adam", params)([weight()])
    assert made.defaults["betas"] == (0.8, 0.9)
    assert params == {"lr": 0.1, "betas": [0.8, 0.9], "torch_adam": False, "adam_w_mode": True}


@pytest.mark.parametrize(
    "kind", [kind for kind in ELEMENTWISE if "Adam" not in (kind.__name__, kind.__name__[:4], kind.__name__[-4:])]
)
def test_others_are_torchs_by_name(kind):
    made = optimizer_maker(kind.__name__, {"lr": 0.25})([weight()])
    assert type(made) is kind and made.defaults["lr"] == 0.25


@pytest.mark.parametrize(
    ("name", "params", "told"),
    [
        ("sgd", {}, "did you mean SGD"),
        ("AdamWW", {}, "did you mean AdamW"),
        ("Lamb", {}, "Lamb is not implemented (its step depends on the norm of whole layers)"),
        ("OneBitAdam", {}, "not implemented"),
        ("Lion", {}, "not implemented"),
        ("Muon", {}, "not implemented"),
        ("MuAdam", {}, "not implemented"),
        ("Adafactor", {}, "not implemented"),
        ("LBFGS", {}, "not implemented"),
        ("Nothing", {}, "known: ASGD"),
        ("AdamW", {"max_grad_norm": 1.0}, "use gradient_clipping"),
        ("AdamW", {"weight_decy": 0.1}, "optimizer.params.weight_decy"),
        ("AdamW", {"amsgrad": True}, "torch_adam"),
        ("AdamW", {"bias_correction": False}, "not implemented"),
        ("Adam", {"adam_w_mode": "no"}, "expected true or false"),
        ("SGD", {"momentun": 0.9}, "did you mean momentum"),
    ],
)
def test_what_a_config_cannot_name(name, params, told):
    with pytest.raises(ConfigError, match=r"^optimizer\.") as caught:
        optimizer_maker(name, params)
    assert told in str(caught.value)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"lr": "1e-3"}, r"optimizer\.params\.lr: expected a number, given '1e-3'; leave the quotes out"),
        ({"lr": None}, r"optimizer\.params\.lr: expected a number, given None"),
        ({"lr": float("inf")}, r"optimizer\.params\.lr: expected a number, given inf"),
        ({"lr": True}, r"optimizer\.params\.lr: expected a number, given True"),
        ({"betas": [0.9]}, r"optimizer\.params\.betas: expected two numbers"),
        ({"betas": "ab"}, r"optimizer\.params\.betas: expected two numbers"),
    ],
)
def test_values_that_are_no_numbers_are_named(params: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        optimizer_maker("AdamW", params)
