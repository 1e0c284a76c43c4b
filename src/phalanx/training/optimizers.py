"""Optimizers by the names of DeepSpeed's config, with the meaning that they have there.

Source: DeepSpeed 0.19.8, `DeepSpeedEngine._configure_basic_optimizer`, `ops/adam/fused_adam.py`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from math import isfinite
from typing import Any

import torch
from torch import optim

from phalanx.config import ConfigError
from phalanx.training.fused_adam import FusedAdam
from phalanx.training.repoint import ELEMENTWISE

_BY_NAME: dict[str, type[optim.Optimizer]] = {kind.__name__: kind for kind in ELEMENTWISE if kind is not FusedAdam}

_LACKING = {
    "lamb": "its step depends on the norm of whole layers",
    "onebitadam": "it compresses what ranks exchange",
    "zerooneadam": "it compresses what ranks exchange",
    "onebitlamb": "it compresses what ranks exchange",
    "lion": "torch has none; give an instance",
    "muon": "it works on whole matrices",
    "muadam": "of the package mup; give an instance",
    "muadamw": "of the package mup; give an instance",
    "musgd": "of the package mup; give an instance",
    "lbfgs": "it evaluates the model several times a step",
    "sparseadam": "gradients here are dense",
    "adafactor": "its step depends on the rows and columns of whole matrices",
}

# What DeepSpeed's FusedAdam takes, with its defaults. Its weight decay is 0 by default, torch.optim.AdamW's is not.
_FUSED_ADAM = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}


def optimizer_maker(
    name: str, params: Mapping[str, Any]
) -> Callable[[Iterable[torch.Tensor] | Iterable[dict[str, Any]]], optim.Optimizer]:
    """What makes the optimizer that a config's `optimizer.type` and `optimizer.params` name, given parameters.

    `Adam` and `AdamW` are DeepSpeed's FusedAdam, and ours: decoupled weight decay (0 by default) also for `Adam`,
    unless `adam_w_mode` is false; with `torch_adam` they are torch's own, with torch's defaults. Every other name is
    that of a class of `torch.optim`. Raises ConfigError for a name that is not implemented, saying why, and for keyword
    arguments that the optimizer does not take.
    """
    given = {key: tuple(value) if isinstance(value, list) else value for key, value in params.items()}
    if "max_grad_norm" in given:
        raise ConfigError("optimizer.params.max_grad_norm: not a setting of an optimizer; use gradient_clipping")
    if name.lower() in ("adam", "adamw"):
        kind, given = _adam(name.lower(), given)
    elif name in _BY_NAME or name.lower() == "adagrad":
        kind = _BY_NAME.get(name, optim.Adagrad)
    else:
        raise ConfigError(f"optimizer.type: {_why_not(name)}")
    known = [key for key in inspect.signature(kind).parameters if key != "params"]
    for key in given:
        if key not in known:
            near = get_close_matches(key, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(known)}"
            raise ConfigError(f"optimizer.params.{key}: {name} has no such setting; {hint}")
        _check_number(key, given[key])
    return lambda parameters: kind(parameters, **given)


def _check_number(key: str, value: Any) -> None:
    """Raise ConfigError for a rate, a decay and the like that is no finite number, or betas that are no two of them."""
    if key == "betas":
        if not isinstance(value, tuple) or len(value) != 2 or not all(map(_is_number, value)):
            raise ConfigError(f"optimizer.params.betas: expected two numbers, given {value!r}")
    elif key in _NUMBERS and not _is_number(value):
        hint = "; leave the quotes out" if isinstance(value, str) else ""
        raise ConfigError(f"optimizer.params.{key}: expected a number, given {value!r}{hint}")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)


_NUMBERS = (
    "lr",
    "eps",
    "weight_decay",
    "momentum",
    "dampening",
    "alpha",
    "rho",
    "lr_decay",
    "initial_accumulator_value",
)


def _adam(name: str, given: dict[str, Any]) -> tuple[type[optim.Optimizer], dict[str, Any]]:
    """The class and arguments that are DeepSpeed's `Adam` or `AdamW`."""
    own_torch = _switch(given, "torch_adam", False)
    decoupled = _switch(given, "adam_w_mode", True) or name == "adamw"
    if own_torch:
        return optim.AdamW if decoupled else optim.Adam, given
    given.pop("set_grad_none", None)  # whether zero_grad frees gradients
    if not _switch(given, "bias_correction", True):
        raise ConfigError("optimizer.params.bias_correction: Adam without bias correction is not implemented")
    if _switch(given, "amsgrad", False):
        raise ConfigError(
            "optimizer.params.amsgrad: DeepSpeed's Adam has no AMSGrad; set torch_adam to true for torch's Adam"
        )
    for key in given:
        if key not in _FUSED_ADAM:
            raise ConfigError(
                f"optimizer.params.{key}: {name} has no such setting; known: {', '.join(_FUSED_ADAM)}, adam_w_mode, "
                "torch_adam (torch's own Adam, with its settings)"
            )
    return FusedAdam, {**_FUSED_ADAM, **given, "adam_w_mode": decoupled}


def _switch(given: dict[str, Any], key: str, default: bool) -> bool:
    value = given.pop(key, default)
    if not isinstance(value, bool):
        raise ConfigError(f"optimizer.params.{key}: expected true or false, given {value!r}")
    return value


def _why_not(name: str) -> str:
    known = ", ".join(sorted(_BY_NAME))
    if name.lower() in _LACKING:
        return f"{name} is not implemented ({_LACKING[name.lower()]}); implemented: {known}"
    near = [kind for kind in _BY_NAME if kind.lower() == name.lower()] or get_close_matches(name, _BY_NAME, n=1)
    return f"{name!r} is unknown; " + (f"did you mean {near[0]}?" if near else f"known: {known}")
