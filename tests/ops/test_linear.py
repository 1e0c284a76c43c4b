"""The plain linear back end, and prepared weights as values that can be saved and made again."""

from __future__ import annotations

import pytest
import torch

from phalanx.ops import registry
from phalanx.ops.linear import PreparedWeight, embedding_lookup, linear, prepare_linear, restore_weight


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("forced", [None, "plain"])
def test_a_prepared_weight_multiplies_and_looks_up(dtype, forced):
    weight, x, bias = torch.randn(40, 24).to(dtype), torch.randn(2, 3, 24).to(dtype), torch.randn(40).to(dtype)
    prepared = prepare_linear(weight, forced=forced)
    assert (prepared.out_features, prepared.in_features, prepared.dtype) == (40, 24, dtype)
    tolerance = 1e-5 if dtype in (torch.float32, torch.float64) else 2e-2
    wanted = torch.nn.functional.linear(x.double(), weight.double(), bias.double())
    torch.testing.assert_close(linear(x, prepared, bias).double(), wanted, rtol=tolerance, atol=tolerance)
    ids = torch.tensor([[3, 39], [0, 3]])
    assert torch.equal(embedding_lookup(prepared, ids), weight[ids])
    assert torch.equal(restore_weight(prepared), weight)


def test_saved_and_made_again():
    prepared = prepare_linear(torch.randn(33, 20))
    again = PreparedWeight(prepared.data.clone(), prepared.layout, 33, 20, prepared.dtype, prepared.aux)
    x = torch.randn(4, 20)
    assert torch.equal(linear(x, again), linear(x, prepared))


def test_refusals():
    with pytest.raises(ValueError, match=r"a weight \[out, in\]; got a tensor of shape \(3,\)"):
        prepare_linear(torch.randn(3))
    with pytest.raises(ValueError, match="no implementation named 'fp3'; choose one of: plain"):
        prepare_linear(torch.randn(3, 4), forced="fp3")
    unknown = PreparedWeight(torch.randn(3, 4), "fp3", 3, 4, torch.float32)
    with pytest.raises(ValueError, match="no implementation named 'fp3'"):
        linear(torch.randn(2, 4), unknown)


def test_a_user_registers_a_layout():
    class Doubled:
        def prepare(self, weight):
            return PreparedWeight(2 * weight, "doubled", *weight.shape, weight.dtype)

        def apply(self, x, weight, bias):
            return torch.nn.functional.linear(x, weight.data / 2, bias)

    registry.register("linear", "doubled", Doubled(), priority=-1)
    try:
        weight, x = torch.randn(3, 4), torch.randn(2, 4)
        prepared = prepare_linear(weight, forced="doubled")
        assert prepared.layout == "doubled"
        assert torch.equal(linear(x, prepared), x @ weight.T)
        assert prepare_linear(weight).layout != "doubled"
    finally:
        registry.unregister("linear", "doubled")
