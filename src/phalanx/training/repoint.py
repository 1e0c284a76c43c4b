"""The user's optimizer, moved in place from the model's parameters to the fragments that this rank owns."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from phalanx.training.fragments import Fragment, by_parameter
from phalanx.training.fused_adam import FusedAdam

# Each element's update depends on that element alone, so they give the same answer on any part of a parameter.
ELEMENTWISE: tuple[type[Optimizer], ...] = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.ASGD,
    FusedAdam,
)


def is_elementwise(optimizer: Optimizer) -> bool:
    """Whether it is one of `ELEMENTWISE`, or a subclass that keeps its `step`."""
    step = inspect.unwrap(type(optimizer).step)
    return any(isinstance(optimizer, known) and step is inspect.unwrap(known.step) for known in ELEMENTWISE)


def check_optimizer(optimizer: Optimizer, *, stage: int, tp_size: int, allow_untested: bool) -> None:
    """Raises ValueError for an optimizer that has run already, or that may not be given parts of parameters."""
    if optimizer.state and not _is_new_adagrad(optimizer):
        raise ValueError(
            f"this {type(optimizer).__name__} already has state for {len(optimizer.state)} parameters, which "
            "belongs to another cut of the model: pass a new optimizer, and load a checkpoint to continue"
        )
    cut = [f"ZeRO stage {stage}"] * (stage > 0) + [f"tensor parallelism over {tp_size} ranks"] * (tp_size > 1)
    if cut and not allow_untested and not is_elementwise(optimizer):
        kind = type(optimizer)
        raise ValueError(
            f"{kind.__module__}.{kind.__qualname__} cannot be used with {' and '.join(cut)}: it would see parts of "
            "parameters, which is right only if it treats every element by itself, as "
            f"{', '.join(known.__name__ for known in ELEMENTWISE)} do. Use one of them, or stage 0 without tensor "
            'parallelism, or, if you know that it does, {"zero_allow_untested_optimizer": true}'
        )


def names_by_group(optimizer: Optimizer, parameters: Mapping[str, nn.Parameter]) -> list[list[str]]:
    """The names of the parameters of each param group. What `parameters` lacks (frozen ones) is left out."""
    names = {id(parameter): name for name, parameter in parameters.items()}
    return [[names[id(p)] for p in group["params"] if id(p) in names] for group in optimizer.param_groups]


def repoint(optimizer: Optimizer, groups: Sequence[Sequence[str]], fragments: Sequence[Fragment]) -> None:
    """Each param group holds the fragments of `groups` instead of its parameters, in the same order.

    The group dicts stay the same objects and keep their hyperparameters, so schedulers that hold them keep working.
    """
    found = by_parameter(fragments)
    for group, names in zip(optimizer.param_groups, groups, strict=True):
        owned = [fragment for name in names for fragment in found.get(name, [])]
        group["params"] = [fragment.tensor for fragment in owned]
        if "param_names" in group:
            group["param_names"] = [fragment.name for fragment in owned]
    if _is_new_adagrad(optimizer):
        _start_adagrad(optimizer)


def _is_new_adagrad(optimizer: Optimizer) -> bool:
    """Adagrad alone makes its state when it is made."""
    return isinstance(optimizer, torch.optim.Adagrad) and all(not state["step"] for state in optimizer.state.values())


def _start_adagrad(optimizer: Optimizer) -> None:
    step = next(iter(optimizer.state.values()))["step"]
    optimizer.state.clear()
    for group in optimizer.param_groups:
        for tensor in group["params"]:
            start = torch.full_like(tensor, group["initial_accumulator_value"])
            optimizer.state[tensor] = {"step": step.clone(), "sum": start}


def _held(optimizer: Optimizer) -> list[list[int]]:
    return [[id(tensor) for tensor in group["params"]] for group in optimizer.param_groups]


class OwnedStep:
    """Lets only the engine step the optimizer: by itself it would find no gradients, and nothing would be trained."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._allowed = False
        self._held = _held(optimizer)
        self._handle = optimizer.register_step_pre_hook(self._check)

    def __call__(self) -> None:
        """One update. Raises RuntimeError if the optimizer holds other tensors than it was given."""
        if _held(self._optimizer) != self._held:
            raise RuntimeError(
                "the optimizer's param groups hold other tensors than when the engine was made (add_param_group?): "
                "what an engine trains is settled then. Give it all groups before, or make a new engine"
            )
        self._allowed = True
        try:
            self._optimizer.step()
        finally:
            self._allowed = False

    def release(self) -> None:
        """The optimizer is its owner's again."""
        self._handle.remove()

    def _check(self, *_: Any) -> None:
        if not self._allowed:
            raise RuntimeError("optimizer.step() was called directly: call engine.step(), which sums and clips first")
