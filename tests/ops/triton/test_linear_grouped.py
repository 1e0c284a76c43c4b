"""Experts by one kernel, against those that are computed one by one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from phalanx.ops import registry
from phalanx.ops.moe import SortedExperts, check_saved, route
from phalanx.ops.triton import grouped
from phalanx.ops.triton.grouped import GroupedExperts, Tile, place
from tests.ops.triton import attention_case  # noqa: F401  (completes the interpreter)


def activate(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs begin as NaN, places as what leads far outside."""
    empty = torch.empty

    def made(*args: object, **kwargs: object) -> Tensor:
        tensor = empty(*args, **kwargs)
        return tensor.fill_(float("nan") if tensor.is_floating_point() else 1 << 30)

    monkeypatch.setattr(torch, "empty", made)


@pytest.mark.parametrize("rows", [4, 16])
@pytest.mark.parametrize(("tokens", "per_token", "experts"), [(1, 2, 5), (9, 2, 3), (40, 3, 8), (3, 1, 40)])
def test_slots_are_placed_by_expert(
    tokens: int, per_token: int, experts: int, rows: int, kernel_device: torch.device
) -> None:
    generator = torch.Generator().manual_seed(tokens)
    ids = torch.rand(tokens, experts, generator=generator).topk(per_token, dim=-1).indices.to(kernel_device)
    placed = place(ids, experts, rows)
    flat = ids.flatten()
    assert placed.order.tolist() == torch.argsort(flat, stable=True).tolist()
    found = []
    for expert, first, end in zip(*(t.tolist() for t in placed[1:]), strict=True):
        if expert >= 0:
            slots = placed.order[first : min(end, first + rows)]
            assert (flat[slots.long()] == expert).all()
            found += slots.tolist()
    assert found == placed.order.tolist()


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize(("tokens", "per_token", "experts"), [(1, 2, 5), (19, 3, 6)])
def test_experts_equal_those_computed_one_by_one(
    dtype: torch.dtype, bound: float, tokens: int, per_token: int, experts: int, kernel_device: torch.device
) -> None:
    generator = torch.Generator().manual_seed(7)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(kernel_device)

    x, first, second = draw(tokens, 48)[:, :40], draw(experts, 2 * 24, 40) / 6, draw(experts, 40, 24) / 5
    weights, ids = route(draw(tokens, experts), per_token, normalize=True)
    x, first, second = (tensor.to(dtype) for tensor in (x, first, second))
    wide = SortedExperts()
    parts = [wide.prepare(tensor.double(), experts, "plain") for tensor in (first, second)]
    wanted = wide.apply(x.double(), weights.double(), ids, *parts, activate)
    backend = GroupedExperts()
    found = backend.apply(
        x, weights, ids, backend.prepare(first, experts, None), backend.prepare(second, experts, None), activate
    )
    assert found.dtype == dtype
    assert float((found.double() - wanted).norm() / wanted.norm()) < bound


def test_large_tiles(kernel_device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grouped, "tile_for", lambda *_: Tile(16, 16, 16, 1, 2))
    test_experts_equal_those_computed_one_by_one(torch.float32, 1e-5, 70, 2, 3, kernel_device)


def test_neither_tokens_nor_width(kernel_device: torch.device) -> None:
    backend = GroupedExperts()
    for tokens, width in ((0, 4), (3, 0)):
        first = backend.prepare(torch.ones(2, 2 * width, 8, device=kernel_device), 2, None)
        second = backend.prepare(torch.ones(2, 8, width, device=kernel_device), 2, None)
        weights, ids = torch.ones(tokens, 1, device=kernel_device), torch.zeros(tokens, 1, dtype=torch.int64)
        out = backend.apply(torch.ones(tokens, 8), weights, ids.to(kernel_device), first, second, activate)
        assert out.shape == (tokens, 8) and not out.any()


def test_what_is_saved_is_read_by_both() -> None:
    chosen = registry.select("moe", device="cuda", dtype=torch.bfloat16)
    assert isinstance(chosen, GroupedExperts)
    experts = chosen.prepare(torch.ones(2, 3, 4), 2, None)
    assert experts.layout == "masked"
    check_saved("masked", (2, 3, 4), [], torch.device("cuda"), torch.bfloat16, {"moe": "grouped"})
    with pytest.raises(ValueError, match="'grouped' holds plain weights, but linear is told to use 'panels'"):
        chosen.prepare(torch.ones(2, 3, 4), 2, "panels")
