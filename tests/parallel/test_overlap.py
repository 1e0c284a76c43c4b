"""The sum of input gradients that travels beside the weights' gradients: in that order, and with the same result."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.distributed.thread_group import ThreadGroup
from phalanx.parallel import overlap
from tests.parallel.models import CONFIGS, batch, tiny_model
from tests.parallel.test_parity import assert_same, cut_and_run


def run(x: Tensor, weights: list[Tensor], bias: Tensor) -> tuple[list[str], Tensor]:
    """Linears behind one entry whose transpose doubles; what happened in the backward, and the output."""
    events: list[str] = []

    def start(g: Tensor) -> overlap.Pending:
        events.append("start")

        def finish() -> Tensor:
            events.append("finish")
            return 2 * g

        return finish

    for place, weight in enumerate(weights):
        weight.register_hook(lambda g, place=place: events.append(f"weight {place}"))
    # Something behind the entry in the graph, which waits for the sum.
    before = x.sin()
    before.register_hook(lambda g: events.append("input"))
    entered = overlap.enter(before, lambda t: t, start)
    parts = [overlap.linear(entered, weight, bias if place == 0 else None) for place, weight in enumerate(weights)]
    return events, torch.cat(parts, -1).cos()


def leaves(readers: int) -> tuple[Tensor, list[Tensor], Tensor]:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    weights = [torch.randn(5, 4, dtype=torch.float64, requires_grad=True) for _ in range(readers)]
    return x, weights, torch.randn(5, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("readers", [1, 2, 3])
def test_weights_come_between_start_and_finish(readers: int) -> None:
    x, weights, bias = leaves(readers)
    events, out = run(x, weights, bias)
    out.sum().backward()
    assert events[0] == "start"
    assert events[-2:] == ["finish", "input"]
    assert sorted(events[1:-2]) == [f"weight {place}" for place in range(readers)]
    found = [t.grad for t in (x, *weights, bias)]
    x, weights, bias = leaves(readers)
    inside = x.sin()
    # Twice the gradient, the same value.
    doubled = 2 * inside - inside.detach()
    parts = [F.linear(doubled, weight, bias if place == 0 else None) for place, weight in enumerate(weights)]
    torch.cat(parts, -1).cos().sum().backward()
    for mine, expected in zip(found, (x, *weights, bias), strict=True):
        torch.testing.assert_close(mine, expected.grad)


def test_frozen_weights_and_inputs() -> None:
    x, weights, bias = leaves(2)
    weights[0].requires_grad_(False)
    events: list[str] = []
    entered = overlap.enter(x, lambda t: t, lambda g: events.append("start") or (lambda: g))
    (overlap.linear(entered, weights[0], bias) + overlap.linear(entered, weights[1], None)).sum().backward()
    assert weights[0].grad is None
    torch.testing.assert_close(weights[1].grad, x.detach().sum((0, 1)).expand(5, 4))
    torch.testing.assert_close(x.grad, (weights[0] + weights[1]).detach().sum(0).expand(2, 3, 4))
    assert events == ["start"]
    x.requires_grad_(False)
    assert overlap.linear(overlap.enter(x, lambda t: t, lambda g: lambda: g), weights[1], None).requires_grad
    with torch.no_grad():
        assert not overlap.enter(x, lambda t: t, lambda g: lambda: g).requires_grad


@pytest.mark.parametrize(
    ("name", "sequence_parallel"),
    [
        pytest.param(name, sequence_parallel, id=f"{name}-{'sp' if sequence_parallel else 'tp'}")
        for place, name in enumerate(CONFIGS)
        for sequence_parallel in (False, True)
        if not (sequence_parallel and name == "mixtral_aux_loss") and (place % 2 == 0) == sequence_parallel
    ],
)
def test_families(name: str, sequence_parallel: bool) -> None:
    model = tiny_model(name)
    inputs = batch(103)
    assert_same(model, cut_and_run(model, 2, inputs, sequence_parallel=sequence_parallel, overlap=True), inputs)


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_activations(reentrant: bool) -> None:
    model = tiny_model("llama", attention_bias=True)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    inputs = batch(103)
    assert_same(model, cut_and_run(model, 2, inputs, overlap=True), inputs)


def test_every_region_of_a_model_overlaps(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[overlap.Pending] = []
    through: list[Tensor] = []
    thread: list[int] = []
    start, weights = ThreadGroup.start_all_reduce, overlap._WeightGradient.backward

    def started(group: ThreadGroup, t: Tensor) -> overlap.Pending:
        finish = start(group, t)
        if group.rank:
            return finish
        begun.append(finish)
        thread[:] = [threading.get_ident()]
        return lambda: (begun.remove(finish), finish())[1]

    def computed(ctx: Any, g: Tensor) -> Any:
        through.extend([g] if begun and threading.get_ident() in thread else [])
        return weights(ctx, g)

    monkeypatch.setattr(ThreadGroup, "start_all_reduce", started)
    monkeypatch.setattr(overlap._WeightGradient, "backward", computed)
    model = tiny_model("llama")
    layers = model.config.num_hidden_layers
    cut_and_run(model, 2, batch(103), overlap=True)
    assert not begun
    # While a sum is under way: q, k, v, gate and up of each layer, and the head.
    assert len(through) == 5 * layers + 1
