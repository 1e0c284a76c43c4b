"""The native norms and activations against the plain PyTorch ones."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.ops import activation, norm, registry
from phalanx.ops.cpu.library import library
from phalanx.ops.cpu.pointwise import SIGMOID_LIKE

pytestmark = pytest.mark.skipif(library() is None, reason="no C++ compiler")

DTYPES = st.sampled_from([torch.float32, torch.bfloat16])
SHAPES = st.sampled_from([(0, 8), (1, 1), (3, 17), (5, 576), (2, 3, 64), (7,), (2, 2, 2, 16)])


def native(op, dtype):
    return registry.select(op, device="cpu", dtype=dtype, forced="native")


def close(found, wanted):
    assert found.dtype == wanted.dtype and found.shape == wanted.shape
    tolerance = 2e-6 if wanted.dtype == torch.float32 else 1e-2
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)


@settings(max_examples=40, deadline=None)
@given(shape=SHAPES, dtype=DTYPES, weight_dtype=DTYPES, strided=st.booleans())
def test_norms(shape, dtype, weight_dtype, strided):
    x = torch.randn(*shape).to(dtype)
    if strided:
        x = torch.cat((x, x), -1)[..., : shape[-1]]
    weight = torch.randn(shape[-1]).to(weight_dtype)
    before = x.clone()
    close(native("rms_norm", dtype)(x, weight, 1e-5), norm.reference_rms_norm(x, weight, 1e-5))
    residual = torch.randn(*shape).to(dtype)
    found = native("add_rms_norm", dtype)(x, residual, weight, 1e-5)
    wanted = norm.reference_add_rms_norm(x, residual, weight, 1e-5)
    close(found[0], wanted[0])
    assert torch.equal(found[1], wanted[1])
    assert torch.equal(x, before)


def test_norm_of_heads_inside_a_fused_projection():
    qkv = torch.randn(5, 6, 32)
    q = qkv[:, 1:4]
    weight = torch.randn(32)
    close(native("rms_norm", torch.float32)(q, weight, 1e-6), norm.reference_rms_norm(q, weight, 1e-6))


def test_norm_refuses_what_does_not_fit():
    with pytest.raises(ValueError, match="a weight of"):
        norm.rms_norm(torch.randn(2, 8), torch.ones(7), 1e-5)
    with pytest.raises(ValueError, match="residual"):
        norm.add_rms_norm(torch.randn(2, 8), torch.randn(3, 8), torch.ones(8), 1e-5)


@settings(max_examples=40, deadline=None)
@given(shape=SHAPES, dtype=DTYPES, name=st.sampled_from(sorted(activation.FUNCTIONS)), strided=st.booleans())
def test_activations(shape, dtype, name, strided):
    x = (torch.randn(*shape[:-1], 2 * shape[-1]) * 4).to(dtype)
    if strided:
        x = torch.cat((x, x), -1)[..., : 2 * shape[-1]]
    close(native("activation", dtype)(x, name), activation.reference_activation(x, name))
    close(native("gated_activation", dtype)(x, name), activation.reference_gated_activation(x, name))


@pytest.mark.parametrize("name", sorted(SIGMOID_LIKE))
def test_activations_over_the_whole_range(name):
    x = torch.cat((torch.linspace(-200, 200, 100_001), torch.tensor([0.0, -0.0, float("inf"), float("nan"), 3e38])))
    found = native("activation", torch.float32)(x, name)
    wanted = activation.FUNCTIONS[name](x.double())
    torch.testing.assert_close(found.double(), wanted, rtol=5e-6, atol=1e-14, equal_nan=True)


def test_refusals():
    with pytest.raises(ValueError, match="must be even"):
        activation.gated_activation(torch.randn(2, 3), "silu")
    with pytest.raises(ValueError, match=r"unknown activation 'sillu'.*silu"):
        activation.activation(torch.randn(2, 4), "sillu")
