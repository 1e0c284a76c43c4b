"""Which modules are fused, and that nothing but their speed changes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from phalanx.parallel.fused import fuse
from tests.parallel.models import tiny_model

pytest.importorskip("triton", reason="triton is not installed")

from tests.ops.triton import interpreter

interpreter.complete()


def gradients(model: nn.Module, batch: Tensor) -> tuple[float, dict[str, Tensor]]:
    loss = model(input_ids=batch, labels=batch).loss
    loss.backward()
    return float(loss), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ("llama", {"model.layers.0.mlp", "model.layers.1.input_layernorm", "model.norm", "loss"}),
        ("qwen3", {"model.layers.0.self_attn.q_norm", "model.layers.0.mlp", "loss"}),
        ("phi3", {"model.layers.0.input_layernorm", "loss"}),
    ],
)
def test_what_is_fused_computes_the_same(family: str, expected: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = tiny_model(family, dtype=torch.float32).to(device)
    plain = copy.deepcopy(model)
    changed = fuse(model)
    assert expected <= set(changed)
    assert all(isinstance(model.get_submodule(name), type(plain.get_submodule(name))) for name in changed[:-1])
    # The kernels are interpreted where there is no GPU.
    monkeypatch.setattr("phalanx.parallel.fused._takes", lambda x, other: True)
    batch = torch.randint(0, 100, (2, 7), device=device)
    loss, found = gradients(model, batch)
    expected_loss, wanted = gradients(plain, batch)
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        assert (found[name] - gradient).norm() <= 1e-5 * gradient.norm() + 1e-7, name


def test_other_norms_and_activations_are_left_alone() -> None:
    for family in ("gemma2", "gpt_neox"):
        assert set(fuse(tiny_model(family, dtype=torch.float32))) <= {"loss"}

    class Norm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))
            self.variance_epsilon = 1e-6

        def forward(self, x: Any) -> Any:
            return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)

    assert fuse(Norm()) == []
