"""Linear layers with few rows, against plain PyTorch in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from phalanx.ops import registry
from phalanx.ops.linear import PlainLinear, PreparedWeight, gated_linear, linear, prepare_linear
from phalanx.ops.triton import linear as triton_linear
from phalanx.ops.triton.linear import MAX_ROWS, Tile, few_rows, takes, tile_for
from tests.ops.triton import attention_case  # noqa: F401  (completes the interpreter)

SMALL = Tile(16, 64, 1, 2)


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
@pytest.mark.parametrize("rows", [1, 2, 16, 17, 33])
@pytest.mark.parametrize(("out_features", "in_features"), [(48, 128), (37, 200), (1, 64), (16, 24), (19, 7)])
def test_few_rows_equal_the_formula(
    rows: int, out_features: int, in_features: int, kernel_device: torch.device
) -> None:
    x, weight, bias = drawn(rows, out_features, in_features, torch.bfloat16, kernel_device)
    wanted = x.double() @ weight.double().T
    assert error(few_rows(x, weight, None), wanted) < 1e-2
    assert error(few_rows(x, weight, bias, tile=SMALL), wanted + bias.double()) < 1e-2


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("rows", [1, 5])
def test_a_gated_weight_is_applied_in_one_kernel(rows: int, kernel_device: torch.device) -> None:
    x, weight, _ = drawn(rows, 2 * 21, 96, torch.float16, kernel_device)
    gate, up = (x.double() @ weight.double().T).half().double().chunk(2, -1)
    assert error(few_rows(x, weight, None, gated=True), torch.nn.functional.silu(gate) * up) < 5e-3


def test_more_dimensions_and_strides(kernel_device: torch.device) -> None:
    x, weight, bias = drawn(6, 20, 64, torch.bfloat16, kernel_device)
    deep = x.reshape(2, 3, 64)
    assert torch.equal(few_rows(deep, weight, bias), few_rows(x, weight, bias).view(2, 3, 20))
    turned = x.T.contiguous().T
    assert torch.equal(few_rows(turned, weight, bias), few_rows(x, weight, bias))
    with pytest.raises(ValueError, match=r"takes \[\.\.\., 64\]; x is \(6, 63\)"):
        few_rows(x[:, :63], weight, bias)


def test_what_the_kernels_take() -> None:
    weight = torch.zeros(8, 16, dtype=torch.bfloat16)
    assert takes(torch.zeros(1, 16, dtype=torch.bfloat16), weight)
    assert takes(torch.zeros(MAX_ROWS, 16, dtype=torch.bfloat16), weight)
    assert not takes(torch.zeros(MAX_ROWS + 1, 16, dtype=torch.bfloat16), weight)
    assert not takes(torch.zeros(0, 16, dtype=torch.bfloat16), weight)
    assert not takes(torch.zeros(1, 16), weight.float())
    assert not takes(torch.zeros(1, 8, dtype=torch.bfloat16), weight.T)


@pytest.mark.parametrize("rows", [1, 8, 64])
@pytest.mark.parametrize("in_features", [64, 576, 1024, 3072, 14336, 1000])
def test_sizes_are_ones_that_kernels_take(rows: int, in_features: int) -> None:
    for out_features in (16, 4096, 128256):
        tile = tile_for(rows, out_features, in_features, 132)
        for size in (tile.columns, tile.inner, tile.prefetch or 1):
            assert size & (size - 1) == 0
        assert tile.inner >= 32


def test_the_layout_is_the_plain_one_and_forced_readers_are_kept() -> None:
    chosen = registry.select("linear", device="cuda", dtype=torch.bfloat16)
    assert isinstance(chosen, triton_linear.TritonLinear)
    assert chosen.prepare(torch.zeros(2, 3, dtype=torch.bfloat16)).layout == "plain"
    plain = prepare_linear(torch.zeros(2, 3), forced="plain")
    assert plain.reader == "plain" and isinstance(plain.backend, PlainLinear)
    other = PreparedWeight(torch.zeros(2, 3), "panels", 2, 3, torch.float32, reader="plain")
    with pytest.raises(ValueError, match="'plain' reads weights in the layout 'plain', not in 'panels'"):
        linear(torch.zeros(1, 3), other)


def test_a_gated_linear_is_its_two_ops_elsewhere() -> None:
    weight, x = torch.randn(12, 5), torch.randn(3, 5)
    gate, up = (x @ weight.T).chunk(2, -1)
    found = gated_linear(x, prepare_linear(weight), "gelu")
    torch.testing.assert_close(found, torch.nn.functional.gelu(gate) * up)
