"""The native linear layer: exact layouts, fp32 accuracy, and rows that do not depend on their batch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.ops import registry
from phalanx.ops.cpu.library import kernels, library
from phalanx.ops.linear import PreparedWeight, embedding_lookup, linear, prepare_linear, restore_weight

pytestmark = pytest.mark.skipif(library() is None, reason="no C++ compiler")

DTYPES = [torch.float32, torch.bfloat16]
SIZES = st.sampled_from([1, 2, 31, 32, 33, 64, 100, 200, 801])


@pytest.fixture(params=["tiles", "vectors"])
def unit(request, monkeypatch):
    """Both kernels, where the machine has both."""
    if request.param == "tiles" and not kernels().amx:
        pytest.skip("no AMX here")
    monkeypatch.setattr(kernels(), "amx", request.param == "tiles")


def make(rows, in_features, out_features, dtype, bf16_valued=False, seed=0):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(out_features, in_features, generator=generator)
    weight = weight.to(torch.bfloat16).to(dtype) if bf16_valued else weight.to(dtype)
    x = torch.randn(rows, in_features + 5, generator=generator).to(dtype)[:, 2 : 2 + in_features]
    return x, weight, torch.randn(out_features, generator=generator).to(dtype)


@settings(max_examples=40, deadline=None)
@given(out_features=SIZES, in_features=SIZES, dtype=st.sampled_from(DTYPES), bf16_valued=st.booleans(), data=st.data())
def test_a_prepared_weight_is_exact(out_features, in_features, dtype, bf16_valued, data):
    _, weight, _ = make(0, in_features, out_features, dtype, bf16_valued)
    prepared = prepare_linear(weight)
    assert prepared.layout == "panels"
    assert prepared.data.dtype == (torch.bfloat16 if bf16_valued else dtype)
    assert torch.equal(restore_weight(prepared), weight)
    ids = torch.tensor(data.draw(st.lists(st.integers(0, out_features - 1), max_size=5)), dtype=torch.int64)
    assert torch.equal(embedding_lookup(prepared, ids), weight[ids])
    assert embedding_lookup(prepared, ids[:, None]).shape == (len(ids), 1, in_features)


@pytest.mark.usefixtures("unit")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bf16_valued", [False, True])
@pytest.mark.parametrize("rows", [1, 3, 16, 17, 33, 64, 71])
@pytest.mark.parametrize(("in_features", "out_features"), [(1, 1), (33, 70), (64, 32), (800, 65), (1601, 33)])
def test_product_equals_float64(dtype, bf16_valued, rows, in_features, out_features):
    x, weight, bias = make(rows, in_features, out_features, dtype, bf16_valued, seed=rows)
    prepared = prepare_linear(weight)
    for shift in (None, bias):
        wanted = x.double() @ weight.double().T + (0 if shift is None else shift.double())
        found = linear(x, prepared, shift)
        assert found.dtype == dtype and found.shape == wanted.shape
        error = (found.double() - wanted).abs().max() / wanted.abs().mean()
        assert error < (2e-6 if dtype == torch.float32 else 2e-2) * max(1, in_features / 256) ** 0.5


@pytest.mark.usefixtures("unit")
def test_fp32_is_not_less_exact_than_torch():
    x, weight, _ = make(200, 1536, 300, torch.float32)
    wanted = x.double() @ weight.double().T

    def error(found):
        return (found - wanted).square().mean().sqrt()

    assert error(linear(x, prepare_linear(weight))) <= error(torch.nn.functional.linear(x, weight))


@pytest.mark.usefixtures("unit")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bf16_valued", [False, True])
def test_a_row_does_not_depend_on_its_batch(dtype, bf16_valued):
    x, weight, bias = make(430, 1000, 100, dtype, bf16_valued)
    prepared = prepare_linear(weight)
    wanted = linear(x, prepared, bias)
    for rows in ([0], [429], list(range(5)), list(range(20, 52)), list(range(100, 330))):
        assert torch.equal(linear(x[rows], prepared, bias), wanted[rows])
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        assert torch.equal(linear(x, prepared, bias), wanted)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.usefixtures("unit")
def test_bf16_valued_weights_give_the_bits_of_fp32_ones():
    x, weight, _ = make(40, 900, 64, torch.float32, bf16_valued=True)
    narrow = prepare_linear(weight)
    padded = torch.nn.functional.pad(weight, (0, 928 - 900)).view(2, 32, 928).transpose(1, 2).contiguous()
    wide = PreparedWeight(padded, "panels", 64, 900, torch.float32)
    assert narrow.data.nbytes * 2 == wide.data.nbytes
    assert torch.equal(linear(x, narrow), linear(x, wide))


def test_leading_dimensions_and_nothing():
    weight = torch.randn(40, 24)
    prepared = prepare_linear(weight)
    x = torch.randn(2, 3, 24)
    torch.testing.assert_close(linear(x, prepared), x @ weight.T)
    assert linear(x[:0], prepared).shape == (0, 3, 40)
    assert linear(x, prepare_linear(weight[:0])).shape == (2, 3, 0)
    bias = torch.randn(40)
    nothing = prepare_linear(weight[:, :0])
    assert torch.equal(linear(x[..., :0], nothing, bias), bias.expand(2, 3, 40))
    assert torch.equal(linear(x[..., :0], nothing), torch.zeros(2, 3, 40))


def test_a_saved_weight_may_lie_anywhere():
    """A file mapped into memory aligns nothing."""
    x, weight, _ = make(9, 64, 64, torch.float32)
    prepared = prepare_linear(weight)
    moved = torch.empty(prepared.data.numel() + 1)[1:].view_as(prepared.data).copy_(prepared.data)
    assert torch.equal(linear(x, PreparedWeight(moved, "panels", 64, 64, torch.float32)), linear(x, prepared))


@pytest.mark.usefixtures("unit")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "out_features"), [(1, 33), (37, 70), (5, 64)])
def test_all_of_the_result_is_written_and_nothing_else(dtype, rows, out_features, monkeypatch):
    x, weight, bias = make(rows, 40, out_features, dtype)
    prepared = prepare_linear(weight)
    wanted = linear(x, prepared, bias)
    buffer = torch.full((rows * out_features + 64,), float("nan"), dtype=dtype)
    monkeypatch.setattr(torch, "empty", lambda *shape, dtype: buffer[32:-32].view(shape))
    found = linear(x, prepared, bias)
    monkeypatch.undo()
    assert torch.equal(found, wanted)
    assert buffer[:32].isnan().all() and buffer[-32:].isnan().all()


def test_refusals():
    prepared = prepare_linear(torch.randn(4, 8))
    with pytest.raises(ValueError, match=r"takes \[..., 8\]"):
        linear(torch.randn(2, 7), prepared)
    with pytest.raises(ValueError, match=r"of torch.float32; x is"):
        linear(torch.randn(2, 8).bfloat16(), prepared)
    with pytest.raises(ValueError, match=r"a bias of \[4\]"):
        linear(torch.randn(2, 8), prepared, torch.randn(5))


def test_other_dtypes_are_left_plain():
    assert prepare_linear(torch.randn(4, 8, dtype=torch.float64)).layout == "plain"
    with pytest.raises(ValueError, match=r"'panels' does not support torch.float64"):
        registry.select("linear", device="cpu", dtype=torch.float64, forced="panels")
