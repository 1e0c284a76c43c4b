"""A head that computes logits of some tokens at a time: the same losses and gradients, and never all logits."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from phalanx.distributed.group import Group, SoloGroup
from phalanx.distributed.mesh import Mesh
from phalanx.distributed.thread_group import run_threads
from phalanx.layout import merge
from phalanx.parallel import parallelize
from phalanx.parallel.chunked_head import chunk_head
from tests.parallel.models import batch, tiny_model


def assert_chunks_are_the_whole(model: nn.Module, inputs: dict[str, Tensor], world: int, tokens: int) -> None:
    loss = model(**inputs).loss
    loss.backward()
    expected = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    models = [copy.deepcopy(model) for _ in range(world)]

    def rank(group: Group) -> Any:
        mine = models[group.rank]
        mine.zero_grad()
        registry = parallelize(mine, Mesh(group, SoloGroup(), torch.device("cpu")))
        chunk_head(mine, tokens)
        output = mine(**inputs)
        assert output.logits is None
        output.loss.backward()
        return output.loss.detach(), {name: p.grad for name, p in mine.named_parameters()}, registry

    ranks = run_threads(world, rank) if world > 1 else [rank(SoloGroup())]
    for found, _, _ in ranks:
        torch.testing.assert_close(found, loss.detach(), rtol=1e-6, atol=0, check_dtype=False)
    for name, gradient in expected.items():
        layout = ranks[0][2][name]
        parts = [grads[name] for _, grads, _ in ranks]
        joined = parts[0] if layout.partition.kind == "replicate" else merge(parts, layout.partition, layout.shape)
        assert (joined - gradient).norm() <= 1e-6 * gradient.norm() + 1e-12, name


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize(
    ("name", "tokens"),
    [("llama", 1), ("llama", 1000), *((name, 5) for name in ("llama", "qwen2_tied", "phi_tied", "gpt2", "mixtral"))],
)
def test_loss_and_gradients(name: str, tokens: int, world: int) -> None:
    assert_chunks_are_the_whole(tiny_model(name), batch(103), world, tokens)


def test_items_in_batch_and_ignored_targets() -> None:
    model = tiny_model("llama")
    inputs: dict[str, Any] = batch(103)
    inputs["labels"][0] = -100
    assert_chunks_are_the_whole(model, {**inputs, "num_items_in_batch": torch.tensor(5)}, 2, 4)


def test_no_step_makes_all_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama", dtype=torch.float32)
    chunk_head(model, 3)
    rows: list[int] = []
    linear = torch.nn.functional.linear

    def noted(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if weight.shape[0] == 103:
            rows.append(x.shape[:-1].numel())
        return linear(x, weight, bias)

    monkeypatch.setattr("torch.nn.functional.linear", noted)
    inputs = batch(103)
    model(**inputs).loss.backward()
    assert sum(rows) == 2 * inputs["input_ids"].numel()
    assert max(rows) == 3
    # Who reads logits gets them.
    rows.clear()
    assert model(input_ids=inputs["input_ids"]).logits.shape[-1] == 103
    model.eval()
    assert model(**inputs).logits.shape[-1] == 103
    assert rows == 2 * [inputs["input_ids"].numel()]


def test_gradients_of_few_bits_are_summed_in_many() -> None:
    model = tiny_model("llama", dtype=torch.bfloat16)
    inputs = batch(103)
    whole = copy.deepcopy(model)
    whole(**inputs).loss.backward()
    chunk_head(model, 1)
    model(**inputs).loss.backward()
    found, expected = (m.lm_head.weight.grad.float() for m in (model, whole))
    # One rounding each.
    assert (found - expected).norm() <= 0.01 * expected.norm()


def test_frozen_heads() -> None:
    model = tiny_model("llama")
    model.lm_head.weight.requires_grad_(False)
    assert_chunks_are_the_whole(model, batch(103), 2, 5)


def test_what_cannot_be_chunked_is_refused() -> None:
    with pytest.raises(ValueError, match="changes its logits"):
        model = tiny_model("gemma2")
        model.config.final_logit_softcapping = 30.0
        chunk_head(model, 4)
        model(**batch(103))
    with pytest.raises(ValueError, match="no plain linear output head"):
        chunk_head(nn.Linear(3, 3), 4)


def test_joined_logits_exclude_it() -> None:
    models = [tiny_model("llama") for _ in range(2)]

    def rank(group: Group) -> None:
        model = models[group.rank]
        parallelize(model, Mesh(group, SoloGroup(), torch.device("cpu")), gather_logits=True)
        with pytest.raises(ValueError, match="no plain linear output head"):
            chunk_head(model, 4)

    run_threads(2, rank)
