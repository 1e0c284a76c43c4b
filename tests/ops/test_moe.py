"""Routing and experts, against formulas written out token by token."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from phalanx.ops import registry
from phalanx.ops.moe import ExpertsBackend, MaskedExperts, PreparedExperts, SortedExperts, check_saved, route

BACKENDS = {"sorted": SortedExperts(), "masked": MaskedExperts()}
CPU = torch.device("cpu")
Given = dict[str, Tensor]


def activate(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


def drawn(
    experts: int = 5, tokens: int = 9, top_k: int = 2, width: int = 7, dtype: torch.dtype = torch.float32
) -> Given:
    generator = torch.Generator().manual_seed(3)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    weights, ids = route(draw(tokens, experts), top_k, normalize=False)
    return {
        "x": draw(tokens, 12),
        "weights": weights,
        "ids": ids,
        "first": draw(experts, 2 * width, 12),
        "second": draw(experts, 12, width),
    }


def run(backend: ExpertsBackend, given: Given, rows: slice = slice(None)) -> Tensor:
    first, second = (backend.prepare(given[name], len(given[name]), None) for name in ("first", "second"))
    return backend.apply(given["x"][rows], given["weights"][rows], given["ids"][rows], first, second, activate)


def by_hand(given: Given) -> Tensor:
    out = []
    for x, weights, ids in zip(given["x"].double(), given["weights"].double(), given["ids"].tolist(), strict=True):
        total = torch.zeros(12, dtype=torch.float64)
        for weight, expert in zip(weights, ids, strict=True):
            total += weight * (given["second"][expert].double() @ activate(given["first"][expert].double() @ x))
        out.append(total)
    return torch.stack(out)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize(
    "sizes", [{}, {"top_k": 5}, {"top_k": 1, "experts": 1}, {"experts": 40, "tokens": 3}, {"width": 1}]
)
def test_experts_equal_the_formula(name: str, sizes: dict[str, int]) -> None:
    given = drawn(**sizes)
    torch.testing.assert_close(run(BACKENDS[name], given).double(), by_hand(given), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", BACKENDS)
def test_sums_of_bf16_experts_are_rounded_once(name: str) -> None:
    given = drawn(dtype=torch.bfloat16)
    out = run(BACKENDS[name], given)
    assert out.dtype == torch.bfloat16 and given["weights"].dtype == torch.float32
    torch.testing.assert_close(out.double(), by_hand(given), rtol=0.05, atol=0.1)


def test_a_token_is_bit_equal_whatever_stands_beside_it() -> None:
    given = drawn(tokens=33)
    together = run(SortedExperts(), given)
    for row in range(33):
        assert torch.equal(run(SortedExperts(), given, slice(row, row + 1))[0], together[row])


@pytest.mark.parametrize("name", BACKENDS)
def test_neither_tokens_nor_width(name: str) -> None:
    assert run(BACKENDS[name], drawn(tokens=0)).shape == (0, 12)
    # A rank that has nothing of the experts adds nothing.
    assert not run(BACKENDS[name], drawn(width=0)).any()


@pytest.mark.parametrize("name", BACKENDS)
def test_an_expert_that_overflows_spoils_its_own_tokens_only(name: str) -> None:
    given = drawn()
    expert = int(given["ids"][0, 0])
    given["second"][expert] = torch.inf
    finite = run(BACKENDS[name], given).isfinite().all(-1)
    assert torch.equal(finite, ~(given["ids"] == expert).any(-1))


def test_routing_is_a_softmax_over_all_experts() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0], [3.0, 3.0, -1.0]])
    chances = logits.double().exp() / logits.double().exp().sum(-1, keepdim=True)
    weights, ids = route(logits, 2, normalize=False)
    assert ids[0].tolist() == [1, 2] and set(ids[1].tolist()) == {0, 1}
    torch.testing.assert_close(weights.double(), chances.gather(1, ids))
    normalized, same = route(logits, 2, normalize=True)
    kept = chances.gather(1, ids)
    torch.testing.assert_close(normalized.double(), kept / kept.sum(-1, keepdim=True))
    assert torch.equal(same, ids)
    assert route(logits.bfloat16(), 2, normalize=True)[0].dtype == torch.float32


def test_the_masked_way_does_not_ask_the_router_on_the_host() -> None:
    given = {name: tensor.to("meta") for name, tensor in drawn().items()}
    assert run(MaskedExperts(), given).shape == (9, 12)


def saved(experts: PreparedExperts, **forced: str) -> None:
    check_saved(experts.layout, experts.shape, list(experts.aux), CPU, experts.dtype, forced)


def test_saved_experts_are_refused_by_name() -> None:
    weight = torch.randn(3, 4, 5)
    experts = SortedExperts().prepare(weight, 3, "plain")
    saved(experts, moe="sorted", linear="plain")
    assert experts.layout == "sorted:plain" and experts.shape == (3, 4, 5)
    with pytest.raises(ValueError, match="linear: this engine is told to use 'panels'"):
        saved(experts, linear="panels")
    with pytest.raises(ValueError, match="1 of 3 experts are absent"):
        check_saved(experts.layout, experts.shape, ["1"], CPU, torch.float32, {})
    with pytest.raises(ValueError, match=r"shape \[experts, out, in\], given \(4, 5\)"):
        check_saved(experts.layout, (4, 5), [], CPU, torch.float32, {})
    with pytest.raises(ValueError, match=r"moe: 'masked' does not support torch\.float32 on cpu"):
        saved(MaskedExperts().prepare(weight, 3, None))


def test_what_can_be_captured_comes_first_on_cuda() -> None:
    chosen = {device: registry.select("moe", device=device, dtype=torch.bfloat16) for device in ("cpu", "cuda")}
    assert isinstance(chosen["cpu"], SortedExperts) and isinstance(chosen["cuda"], MaskedExperts)
