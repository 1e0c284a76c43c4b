"""Linear layers with one row, against plain PyTorch in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from phalanx.ops import registry
from phalanx.ops.activation import reference_gated_activation
from phalanx.ops.linear import PlainLinear, PreparedWeight, gated_linear, linear, prepare_linear
from phalanx.ops.triton import linear as triton_linear
from phalanx.ops.triton.activation_kernels import KINDS
from phalanx.ops.triton.linear import RowTile, one_row, takes, tile_for
from tests.ops.triton import attention_case  # noqa: F401  (completes the interpreter)

SMALL = RowTile(16, 64, 1, 0)


def drawn(
    rows: int, out_features: int, in_features: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, ...]:
    """x, weight and bias, the first two with NaN beyond their ends."""
    generator = torch.Generator().manual_seed(rows * 1000 + out_features + in_features)
    x = torch.full((rows + 1, in_features + 8), float("nan"))
    weight = torch.full((out_features + 1, in_features + 16), float("nan"))
    x[:rows, :in_features] = torch.randn(rows, in_features, generator=generator)
    weight[:out_features, :in_features] = torch.randn(out_features, in_features, generator=generator) / in_features**0.5
    bias = torch.randn(out_features, generator=generator)
    x, weight, bias = (t.to(dtype).to(device) for t in (x, weight, bias))
    return x[:rows, :in_features], weight[:out_features, :in_features], bias


def error(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted).norm() / wanted.norm())


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs begin as NaN."""
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, **k: empty(*a, **k).fill_(float("nan")))


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(("out_features", "in_features"), [(48, 128), (37, 200), (1, 64), (16, 24), (19, 7)])
def test_one_row_equals_the_formula(out_features: int, in_features: int, kernel_device: torch.device) -> None:
    x, weight, bias = drawn(1, out_features, in_features, torch.bfloat16, kernel_device)
    wanted = x.double() @ weight.double().T
    assert error(one_row(x, weight, None), wanted) < 1e-2
    assert error(one_row(x[0], weight, bias, tile=SMALL), wanted[0] + bias.double()) < 1e-2
    wide = one_row(x, weight, None, torch.float32)
    assert wide.dtype == torch.float32 and error(wide, wanted) < 1e-5
    with pytest.raises(ValueError, match=r"takes \[\.\.\., "):
        one_row(x[:, 1:], weight, bias)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize(
    ("out_features", "in_features", "tile"),
    [(48, 128, None), (38, 200, RowTile(8, 64, 1, 0)), (2, 64, None), (74, 72, SMALL)],
)
def test_one_row_gated_equals_the_formula(
    name: str, out_features: int, in_features: int, tile: RowTile | None, kernel_device: torch.device
) -> None:
    x, weight, bias = drawn(1, out_features, in_features, torch.bfloat16, kernel_device)
    product = x.double() @ weight.double().T
    for shift in (None, bias):
        wanted = reference_gated_activation(product if shift is None else product + shift.double(), name)
        found = one_row(x, weight, shift, tile=tile, gate=KINDS[name])
        assert found.shape == (1, out_features // 2)
        # A single result may be 0.
        assert float((found.double() - wanted).norm()) <= 1e-2 * float(wanted.norm())


def test_where_a_product_is_gated_at_once(kernel_device: torch.device) -> None:
    x, weight, bias = drawn(2, 32, 64, torch.bfloat16, kernel_device)
    backend = triton_linear.TritonLinear()
    prepared = backend.prepare(weight)
    found = backend.apply_gated(x[:1], prepared, bias, "silu")
    wanted = reference_gated_activation(x[:1].double() @ weight.double().T + bias.double(), "silu")
    assert found is not None and error(found, wanted) < 1e-2
    assert backend.apply_gated(x, prepared, bias, "silu") is None
    assert backend.apply_gated(x[:1], prepared, bias, "hardswish") is None
    assert backend.apply_gated(x[:1], backend.prepare(weight[:31]), None, "silu") is None
    assert gated_linear(x[:1], prepare_linear(weight, forced="plain"), None, "silu") is None


def test_what_the_kernels_take() -> None:
    weight = torch.zeros(8, 16, dtype=torch.bfloat16)
    assert takes(torch.zeros(1, 16, dtype=torch.bfloat16), weight)
    assert not takes(torch.zeros(2, 16, dtype=torch.bfloat16), weight)
    assert not takes(torch.zeros(0, 16, dtype=torch.bfloat16), weight)
    assert not takes(torch.zeros(1, 16), weight.float())
    assert not takes(torch.zeros(1, 8, dtype=torch.bfloat16), weight.T)


@pytest.mark.parametrize("in_features", [64, 576, 1024, 3072, 14336, 1000])
def test_sizes_are_ones_that_the_kernel_takes(in_features: int) -> None:
    tile = tile_for(in_features)
    assert tile.columns & (tile.columns - 1) == 0 and tile.inner & (tile.inner - 1) == 0 and tile.inner >= 32
    assert tile.steps in (0, -(-in_features // tile.inner))


def test_the_layout_is_the_plain_one_and_forced_readers_are_kept() -> None:
    chosen = registry.select("linear", device="cuda", dtype=torch.bfloat16)
    assert isinstance(chosen, triton_linear.TritonLinear)
    assert chosen.prepare(torch.zeros(2, 3, dtype=torch.bfloat16)).layout == "plain"
    plain = prepare_linear(torch.zeros(2, 3), forced="plain")
    assert plain.reader == "plain" and isinstance(plain.backend, PlainLinear)
    other = PreparedWeight(torch.zeros(2, 3), "panels", 2, 3, torch.float32, reader="plain")
    with pytest.raises(ValueError, match="'plain' reads weights in the layout 'plain', not in 'panels'"):
        linear(torch.zeros(1, 3), other)
