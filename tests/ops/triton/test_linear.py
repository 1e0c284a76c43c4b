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
from phalanx.ops.triton.linear import RowsTile, RowTile, few_rows, few_rows_tile, one_row, rows_tile, takes, tile_for
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


TILES = [
    RowsTile(8, 64, 64, 2, True),
    RowsTile(16, 128, 32, 2, True, 64),
    RowsTile(16, 32, 64, 3, False, 64),
    RowsTile(32, 64, 32, 2, True),
    RowsTile(64, 64, 64, 2, False),
    RowsTile(64, 128, 32, 2, True),
]


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize(("rows", "out_features", "in_features"), [(2, 48, 128), (7, 130, 100), (70, 34, 64)])
def test_a_few_rows_equal_the_formula(
    dtype: torch.dtype, tile: RowsTile, rows: int, out_features: int, in_features: int, kernel_device: torch.device
) -> None:
    x, weight, bias = drawn(rows, out_features, in_features, dtype, kernel_device)
    product = x.double() @ weight.double().T
    assert error(few_rows(x, weight, None, dtype, tile), product) < 1e-2
    wide = few_rows(x, weight, bias, torch.float32, tile)
    assert wide.dtype == torch.float32 and error(wide, product + bias.double()) < 1e-5
    gated = few_rows(x, weight, bias, dtype, tile, gate="silu")
    assert gated.shape == (rows, out_features // 2)
    assert error(gated, reference_gated_activation(product + bias.double(), "silu")) < 1e-2


def test_which_products_have_a_few_rows(kernel_device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = triton_linear.TritonLinear()
    x, weight, bias = drawn(5, 4608, 256, torch.bfloat16, kernel_device)
    prepared = backend.prepare(weight)
    product = x.double() @ weight.double().T + bias.double()
    gated = reference_gated_activation(product, "gelu")
    if kernel_device.type == "cpu":
        assert few_rows_tile(x, prepared) is None
        monkeypatch.setattr(triton_linear, "launches_early", lambda device: True)
    assert few_rows_tile(x, prepared) == rows_tile(5, 4608, 256, 132) is not None
    for other in (x[:1], x[:0], x[:, 1:], x.float(), x[None], drawn(65, 4608, 256, torch.bfloat16, kernel_device)[0]):
        assert few_rows_tile(other, prepared) is None
    if kernel_device.type == "cpu":
        # Interpreted kernels take no part in early launches.
        monkeypatch.setattr("phalanx.ops.triton.support.launches_early", lambda device: False)
    assert error(backend.apply(x, prepared, bias), product) < 1e-2
    found = backend.apply_gated(x, prepared, bias, "gelu")
    assert found is not None and error(found, gated) < 1e-2
    assert backend.apply_gated(x[None], prepared, bias, "gelu") is None


@pytest.mark.parametrize(("out_features", "in_features"), [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)])
def test_sizes_of_a_few_rows_are_ones_that_the_kernel_takes(out_features: int, in_features: int) -> None:
    found = {rows: rows_tile(rows, out_features, in_features, 132) for rows in range(2, 65)}
    for rows, tile in found.items():
        if tile is not None:
            assert tile.rows >= rows and in_features % tile.inner == 0
            # What a program of a Hopper GPU can have.
            assert (tile.rows + tile.columns) * tile.inner * 2 * tile.stages <= 232448
    assert found[16] is not None and found[64] is not None
    assert rows_tile(16, 1024, in_features, 132) is None and rows_tile(16, out_features, 1000, 132) is None


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
