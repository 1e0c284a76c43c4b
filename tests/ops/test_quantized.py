"""Quantised weights in plain PyTorch, against the definition of each layout."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from phalanx.ops.linear import PreparedWeight, embedding_lookup, linear, prepare_linear, restore_weight
from phalanx.ops.quantized import (
    LAYOUTS,
    int4_group,
    pack_int4,
    quantize_fp8,
    quantize_fp8_weight,
    quantize_int4,
    unpack_int4,
    weight_layout,
)


def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def error(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


@pytest.mark.parametrize(("layout", "bound"), [("fp8", 0.03), ("fp8_weights", 0.03), ("int8", 0.01), ("int4", 0.1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_weight_is_restored_within_the_steps_of_its_layout(layout: str, bound: float, dtype: torch.dtype) -> None:
    weight = drawn(48, 192, dtype=dtype)
    prepared = prepare_linear(weight, layout=layout)
    assert (prepared.layout, prepared.out_features, prepared.in_features, prepared.dtype) == (layout, 48, 192, dtype)
    restored = restore_weight(prepared)
    assert restored.dtype == dtype and 0.002 < error(restored, weight) < bound
    ids = torch.tensor([[0, 47], [3, 3]])
    assert torch.equal(embedding_lookup(prepared, ids), restored[ids])
    assert prepared.data.nbytes * 8 == weight.numel() * (4 if layout == "int4" else 8)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_products_are_those_of_the_restored_weight(layout: str) -> None:
    weight, x, bias = drawn(24, 64), drawn(2, 3, 64), drawn(24)
    prepared = prepare_linear(weight, layout=layout)
    seen = x
    if layout == "fp8":
        numbers, scale = quantize_fp8(x)
        assert error(numbers.float() * scale[..., None], x) < 0.03
        seen = numbers.float() * scale[..., None]
    wanted = seen.double() @ restore_weight(prepared).double().T + bias.double()
    assert error(linear(x, prepared, bias), wanted) < 1e-5
    saved = PreparedWeight(prepared.data.clone(), layout, 24, 64, torch.float32, dict(prepared.aux))
    assert torch.equal(linear(x, saved, bias), linear(x, prepared, bias))


def test_a_token_does_not_depend_on_those_beside_it() -> None:
    x, prepared = drawn(5, 64), prepare_linear(drawn(24, 64), layout="fp8")
    together = linear(x, prepared)
    for row in range(5):
        torch.testing.assert_close(linear(x[row : row + 1], prepared)[0], together[row])


def test_fp8_weights_are_those_of_fp8() -> None:
    both = [prepare_linear(drawn(24, 64), layout=layout) for layout in ("fp8", "fp8_weights")]
    assert torch.equal(*(one.data.view(torch.uint8) for one in both))
    assert torch.equal(*(one.aux["scale"] for one in both))


@pytest.mark.parametrize(
    ("quantization", "hidden_size", "layout"),
    [
        ("fp8", 2047, "fp8_weights"),
        ("fp8", 2048, "fp8"),
        ("fp8", None, "fp8"),
        ("fp8_weights", 8192, "fp8_weights"),
        ("int8", 64, "int8"),
        (None, 64, None),
    ],
)
def test_fp8_of_a_narrow_model_is_of_weights_alone(
    quantization: str | None, hidden_size: int | None, layout: str | None
) -> None:
    assert weight_layout(quantization, hidden_size) == layout


def test_int4_takes_the_range_with_the_least_error() -> None:
    weight = drawn(16, 128)
    numbers, scale, offset = quantize_int4(weight, 32)
    assert int(numbers.min()) >= 0 and int(numbers.max()) <= 15
    found = (numbers.float().unflatten(1, (4, 32)) * scale.T[..., None] + offset.T[..., None]).flatten(1)
    low, high = weight.unflatten(1, (4, 32)).aminmax(dim=-1, keepdim=True)
    step = (high - low) / 15
    plain = (((weight.unflatten(1, (4, 32)) - low) / step).round() * step + low).flatten(1)
    assert error(found, weight) < error(plain, weight)
    assert torch.equal(unpack_int4(pack_int4(numbers)), numbers)


def test_fp8_takes_the_scale_with_the_least_error() -> None:
    weight = torch.randn(40, 576, generator=torch.Generator().manual_seed(0))
    weight[3] = 0

    def wrong(numbers: Tensor, scale: Tensor) -> Tensor:
        return (numbers.float() * scale[:, None] - weight).square().sum(1)

    plain, searched = wrong(*quantize_fp8(weight)), wrong(*quantize_fp8_weight(weight))
    assert (searched <= plain).all() and searched.sum() < 0.97 * plain.sum()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_not_finite_in_a_weight_stays_seen(layout: str) -> None:
    weight = torch.ones(4, 64)
    weight[0, 1], weight[1, 2], weight[2, 40] = torch.inf, torch.nan, -torch.inf
    prepared = prepare_linear(weight, layout=layout)
    assert restore_weight(prepared).isfinite().all(1).tolist() == [False, False, False, True]
    assert linear(torch.ones(2, 64), prepared).isfinite().tolist() == [[False, False, False, True]] * 2


def test_four_bit_weights_are_kept_exactly() -> None:
    numbers = torch.randint(0, 16, (8, 64), generator=torch.Generator().manual_seed(0))
    numbers[:, ::32], numbers[:, 1::32] = 0, 15
    weight = numbers.float() * 0.25 - 1.5
    torch.testing.assert_close(restore_weight(prepare_linear(weight, layout="int4")), weight)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_zeros_and_nothing(layout: str) -> None:
    assert not restore_weight(prepare_linear(torch.zeros(4, 64), layout=layout)).any()
    assert linear(torch.zeros(3, 64), prepare_linear(torch.zeros(0, 64), layout=layout)).shape == (3, 0)
    assert linear(torch.zeros(0, 64), prepare_linear(torch.ones(4, 64), layout=layout)).shape == (0, 4)


def test_groups_of_int4() -> None:
    assert [int4_group(size) for size in (4096, 14336, 8320, 576, 2048, 64)] == [128, 128, 64, 32, 32, 32]
    with pytest.raises(ValueError, match="multiple of 64; this one has 96"):
        prepare_linear(torch.zeros(4, 96), layout="int4")


def test_nothing_is_quantised_that_nobody_asked_for() -> None:
    assert prepare_linear(drawn(8, 64, dtype=torch.float64)).layout == "plain"
