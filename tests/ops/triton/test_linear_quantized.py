"""Kernels of quantised weights against the plain back ends of the same layouts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from phalanx.ops.activation import reference_gated_activation
from phalanx.ops.linear import prepare_linear, reader_of
from phalanx.ops.quantized import LAYOUTS, Fp8Linear, Fp8WeightLinear, Int4Linear, Int8Linear, quantize_fp8
from phalanx.ops.triton import activation as activation_module
from phalanx.ops.triton import fp8_linear, quantized_linear
from phalanx.ops.triton.activation import gated_activation, gated_activation_fp8
from phalanx.ops.triton.fp8_linear import Fp8RowTile, TritonFp8, few_rows, one_row, quantize_rows
from phalanx.ops.triton.fp8_rows import Fp8Rows, leave, left_beside
from phalanx.ops.triton.norm import add_rms_norm, add_rms_norm_fp8, rms_norm, rms_norm_fp8
from phalanx.ops.triton.quantized_linear import TritonFp8Weights, TritonInt4, TritonInt8
from tests.ops.triton import attention_case  # noqa: F401  (completes the interpreter)

BACKENDS = {
    "fp8": (TritonFp8(), Fp8Linear()),
    "fp8_weights": (TritonFp8Weights(), Fp8WeightLinear()),
    "int8": (TritonInt8(), Int8Linear()),
    "int4": (TritonInt4(), Int4Linear()),
}


def drawn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def error(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs begin as NaN, where they can."""
    empty = torch.empty

    def made(*args: object, **kwargs: object) -> Tensor:
        tensor = empty(*args, **kwargs)
        return tensor.fill_(float("nan")) if tensor.is_floating_point() and tensor.element_size() > 1 else tensor

    monkeypatch.setattr(torch, "empty", made)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("rows", "out_features", "in_features"), [(1, 40, 64), (3, 17, 256), (17, 33, 320), (40, 16, 192)]
)
def test_few_rows_equal_the_plain_back_end(
    layout: str, dtype: torch.dtype, rows: int, out_features: int, in_features: int, kernel_device: torch.device
) -> None:
    kernel, plain = BACKENDS[layout]
    weight = (drawn(out_features, in_features, dtype=dtype) / in_features**0.5).to(kernel_device)
    x = drawn(rows, in_features + 16, dtype=dtype).to(kernel_device)[:, :in_features]
    bias = drawn(out_features, dtype=dtype).to(kernel_device)
    prepared = plain.prepare(weight)
    for shift in (None, bias):
        wide = replace(prepared, dtype=torch.float32)
        wanted = plain.apply(x.float(), wide, None if shift is None else shift.float())
        assert error(kernel.apply(x, prepared, shift), wanted) < 1e-2


@pytest.mark.parametrize(
    ("rows", "out_features", "in_features", "tile"),
    [
        (1, 9, 128, Fp8RowTile(4, 64, 2, 0)),
        (1, 9, 120, Fp8RowTile(4, 64, 2, 0)),
        (1, 9, 576, Fp8RowTile(2, 64, 0, 128)),  # more steps than are summed in fp16
        (1, 5, 500, Fp8RowTile(8, 64, 0, 0)),
        (2, 70, 200, None),
        (20, 70, 512, None),
        (33, 70, 200, None),
        (64, 20000, 64, None),
        (65, 40, 96, None),
    ],
)
def test_rows_of_fp8_in_all_sizes(
    rows: int, out_features: int, in_features: int, tile: Fp8RowTile | None, kernel_device: torch.device
) -> None:
    prepared = Fp8Linear().prepare(drawn(out_features, in_features).to(kernel_device))
    numbers, scale = quantize_fp8(drawn(rows, in_features).to(kernel_device))
    bias = drawn(out_features).to(kernel_device)
    wanted = (numbers.double() * scale[:, None]) @ (prepared.data.double() * prepared.aux["scale"][:, None]).T + bias
    found = one_row(numbers, scale, prepared, bias, tile) if rows == 1 else few_rows(numbers, scale, prepared, bias)
    assert error(found, wanted) < 1e-2


@pytest.mark.parametrize(
    ("rows", "out_features", "in_features", "tile"),
    [
        (1, 40, 64, None),
        (1, 18, 120, Fp8RowTile(4, 64, 2, 0)),
        (1, 600, 64, None),
        (1, 26, 576, Fp8RowTile(8, 64, 0, 128)),
        (2, 140, 64, None),
        (20, 36, 512, None),
        (33, 20000, 64, None),
    ],
)
def test_gated_rows_of_fp8(
    rows: int, out_features: int, in_features: int, tile: Fp8RowTile | None, kernel_device: torch.device
) -> None:
    prepared = Fp8Linear().prepare((drawn(out_features, in_features) / in_features**0.5).to(kernel_device))
    numbers, scale = quantize_fp8(drawn(rows, in_features).to(kernel_device))
    bias = drawn(out_features).to(kernel_device)
    product = (numbers.double() * scale[:, None]) @ (prepared.data.double() * prepared.aux["scale"][:, None]).T + bias
    if rows == 1:
        found = one_row(numbers, scale, prepared, bias, tile, gate="silu")
    else:
        found = few_rows(numbers, scale, prepared, bias, gate="silu")
    assert error(found, reference_gated_activation(product, "silu")) < 1e-2
    beside = left_beside(found)
    assert beside is not None
    same, same_scale = quantize_rows(found)
    assert torch.equal(beside.scale, same_scale)
    assert torch.equal(beside.numbers.view(torch.uint8), same.view(torch.uint8))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_where_a_quantised_row_is_gated_at_once(layout: str, kernel_device: torch.device) -> None:
    kernel, plain = BACKENDS[layout]
    prepared, bias = plain.prepare(drawn(32, 64).to(kernel_device)), drawn(32).to(kernel_device)
    x = drawn(2, 64).to(kernel_device)
    found = kernel.apply_gated(x[:1], prepared, bias, "gelu")
    if layout == "int4":
        assert found is None
        return
    wide = replace(prepared, dtype=torch.float32)
    wanted = reference_gated_activation(plain.apply(x[:1].float(), wide, bias.float()), "gelu")
    assert found is not None and error(found, wanted) < 1e-2
    assert (left_beside(found) is not None) == (layout == "fp8")
    assert (kernel.apply_gated(x, prepared, bias, "gelu") is None) == (layout != "fp8" or kernel_device.type == "cpu")
    assert kernel.apply_gated(x[:1], prepared, bias, "hardswish") is None


def test_sums_in_fp16_do_not_overflow(kernel_device: torch.device) -> None:
    """All numbers are the largest there are, of one sign."""
    prepared = Fp8Linear().prepare(torch.ones(3, 16384, dtype=torch.bfloat16, device=kernel_device))
    numbers, scale = quantize_fp8(torch.ones(1, 16384, device=kernel_device))
    assert error(one_row(numbers, scale, prepared, None), torch.full((1, 3), 16384.0, device=kernel_device)) < 1e-2


@pytest.mark.parametrize("processors", [1, 132])
@pytest.mark.parametrize("width", [40, 1500, 2500])
def test_norms_and_activations_leave_rows_quantised(
    width: int, processors: int, kernel_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(activation_module, "multiprocessors", lambda device: processors)
    x, residual = drawn(3, width).to(kernel_device), drawn(3, width + 1).to(kernel_device)[:, :width]
    weight, both = drawn(width).to(kernel_device), drawn(5, 2 * width).to(kernel_device)
    x[1] = 0
    pairs = [
        (rms_norm_fp8(x, weight, 1e-5), rms_norm(x, weight, 1e-5)),
        (add_rms_norm_fp8(x, residual, weight, 1e-5)[0], add_rms_norm(x, residual, weight, 1e-5)[0]),
        (gated_activation_fp8(both, "silu"), gated_activation(both, "silu")),
    ]
    for found, plain in pairs:
        torch.testing.assert_close(found, plain, rtol=0, atol=0)
        rows = left_beside(found)
        assert rows is not None
        numbers, scale = quantize_rows(plain)
        torch.testing.assert_close(rows.scale, scale, rtol=0, atol=0)
        assert torch.equal(rows.numbers.view(torch.uint8), numbers.view(torch.uint8))
    heads = rms_norm_fp8(x.view(3, 2, width // 2), weight[: width // 2], 1e-5)
    assert left_beside(heads) is None


def test_a_product_takes_what_was_left_beside_its_rows(
    kernel_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared = Fp8Linear().prepare(drawn(32, 64).to(kernel_device))
    x = drawn(3, 64).to(kernel_device)
    rows = Fp8Rows(*quantize_fp8(2 * x))
    monkeypatch.setattr(fp8_linear, "quantize_rows", None)
    found = TritonFp8().apply(leave(x, rows), prepared, None)
    assert error(found, Fp8Linear().apply(2 * x, prepared, None)) < 1e-2


def test_what_is_not_finite_in_rows_stays_seen(kernel_device: torch.device) -> None:
    finite = [True, False, False, False]
    x = drawn(4, 96).to(kernel_device)
    x[1, 3], x[2, 5], x[3] = torch.nan, torch.inf, torch.nan
    weight = torch.ones(48, dtype=torch.bfloat16, device=kernel_device)
    for rows in (
        Fp8Rows(*quantize_rows(x)),
        left_beside(rms_norm_fp8(x[:, :48], weight, 1e-5)),
        left_beside(gated_activation_fp8(x, "silu")),
    ):
        assert rows is not None
        assert (rows.numbers.float() * rows.scale[:, None]).isfinite().all(1).tolist() == finite
    prepared = Fp8Linear().prepare(drawn(20, 96).to(kernel_device))
    for found in (TritonFp8().apply(x, prepared, None), TritonFp8().apply(x[3:], prepared, None)):
        assert found.isfinite().all(1).tolist() == finite[-len(found) :]


@pytest.mark.parametrize("width", [40, 5000, 20000])
def test_rows_are_quantised_as_in_plain_pytorch(width: int, kernel_device: torch.device) -> None:
    x = drawn(3, width).to(kernel_device)
    x[1] = 0
    numbers, scale = quantize_rows(x)
    wanted, wanted_scale = quantize_fp8(x)
    torch.testing.assert_close(scale, wanted_scale)
    assert error(numbers.float() * scale[:, None], wanted.float() * wanted_scale[:, None]) < 1e-6


@pytest.mark.parametrize(("layout", "in_features"), [("fp8_weights", 1100), ("int8", 1100), ("int4", 320)])
def test_weights_are_restored(layout: str, in_features: int, kernel_device: torch.device) -> None:
    kernel, plain = BACKENDS[layout]
    prepared = plain.prepare(drawn(37, in_features).to(kernel_device))
    assert error(kernel.restore(prepared), plain.restore(prepared)) < 5e-3


def test_many_rows_and_none(kernel_device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantized_linear, "WEIGHT_ONLY_ROWS", dict.fromkeys(BACKENDS, 2))
    monkeypatch.setattr(fp8_linear, "FEW_ROWS_ODD", 2)
    for layout, (kernel, plain) in BACKENDS.items():
        # Not a multiple of 16, so that fp8 takes the way without the library's scaled product.
        prepared = plain.prepare(drawn(17, 64).to(kernel_device))
        x = drawn(3, 2, 64).to(kernel_device)
        found = kernel.apply(x, prepared, None)
        assert found.shape == (3, 2, 17) and error(found, plain.apply(x, prepared, None)) < 1e-2, layout
        assert kernel.apply(x[:0], prepared, None).shape == (0, 2, 17)
    with pytest.raises(ValueError, match=r"takes \[\.\.\., 64\] of torch.bfloat16; x is \(3, 2, 63\)"):
        BACKENDS["fp8"][0].apply(drawn(3, 2, 63), prepared, None)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_gpu_reads_the_layouts_by_kernels(layout: str) -> None:
    device = torch.device("cuda")
    assert type(reader_of(layout, device, torch.bfloat16)) is type(BACKENDS[layout][0])
    assert type(reader_of(layout, device, torch.float32)) is type(BACKENDS[layout][1])
    assert type(prepare_linear(drawn(4, 64), layout=layout).backend) is type(BACKENDS[layout][1])


def test_a_gpu_too_old_for_e4m3_kernels_multiplies_in_plain_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for capability, kind in (((8, 6), Fp8WeightLinear), ((8, 9), TritonFp8Weights)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, found=capability: found)
        assert type(reader_of("fp8_weights", device, torch.float16)) is kind
        assert type(reader_of("int8", device, torch.float16)) is TritonInt8
