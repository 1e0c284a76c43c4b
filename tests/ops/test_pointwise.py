"""Rope, norms and activations against transformers and PyTorch."""

from __future__ import annotations

import pytest
import torch
from transformers.activations import ACT2FN
from transformers.models.gptj.modeling_gptj import apply_rotary_pos_emb as apply_interleaved
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from phalanx.ops.activation import FUNCTIONS, activation, check_activation, gated_activation
from phalanx.ops.norm import add_rms_norm, layer_norm, rms_norm
from phalanx.ops.rope import rope_write_kv, rotate


def angles(tokens, half):
    return torch.arange(tokens)[:, None] / 10000 ** (torch.arange(half) / half)


def test_half_split_rope_is_that_of_llama():
    q, k = torch.randn(5, 4, 16), torch.randn(5, 2, 16)
    angle = angles(5, 8)
    both = torch.cat((angle, angle), -1)[None]
    wanted_q, wanted_k = apply_rotary_pos_emb(q.transpose(0, 1)[None], k.transpose(0, 1)[None], both.cos(), both.sin())
    torch.testing.assert_close(rotate(q, angle.cos(), angle.sin()), wanted_q[0].transpose(0, 1))
    torch.testing.assert_close(rotate(k, angle.cos(), angle.sin()), wanted_k[0].transpose(0, 1))


def test_interleaved_rope_is_that_of_gptj():
    x, angle = torch.randn(1, 5, 4, 16), angles(5, 8)
    wanted = apply_interleaved(x, angle.sin()[None], angle.cos()[None])
    torch.testing.assert_close(rotate(x[0], angle.cos(), angle.sin(), interleaved=True), wanted[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_partial_rope_and_the_cache(dtype):
    q, k, v = torch.randn(3, 4, 2, 8, dtype=dtype)
    caches = torch.zeros(2, 3, 4, 2, 8, dtype=dtype)
    slots = torch.tensor([11, 0, 5, 6])
    angle = angles(4, 2)
    found = rope_write_kv(q, k, v, angle.cos(), angle.sin(), slots, *caches)
    assert torch.equal(found[..., 4:], q[..., 4:]) and not torch.equal(found[1:, :, :4], q[1:, :, :4])
    torch.testing.assert_close(caches[0].flatten(0, 1)[slots], rotate(k, angle.cos(), angle.sin()))
    assert torch.equal(caches[1].flatten(0, 1)[slots], v)
    assert caches.count_nonzero() == 2 * k.numel()
    assert torch.equal(rope_write_kv(q, k, v, None, None, slots, *caches), q)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_norms_are_those_of_transformers_and_torch(dtype):
    x, residual = torch.randn(2, 3, 40).to(dtype)
    weight, bias = torch.randn(2, 40).to(dtype)
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if dtype == torch.bfloat16 else {"rtol": 2e-6, "atol": 2e-6}
    module = LlamaRMSNorm(40, eps=1e-5).to(dtype)
    module.weight.data = weight
    torch.testing.assert_close(rms_norm(x, weight, 1e-5), module(x), **tolerance)
    normed, new = add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(new, x + residual)
    torch.testing.assert_close(normed, module(x + residual), **tolerance)
    wanted = torch.nn.functional.layer_norm(x, (40,), weight, bias, 1e-5)
    torch.testing.assert_close(layer_norm(x, weight, bias, 1e-5), wanted, **tolerance)
    wanted = torch.nn.functional.layer_norm(x, (40,), None, None, 1e-5)
    torch.testing.assert_close(layer_norm(x, None, None, 1e-5), wanted, **tolerance)


@pytest.mark.parametrize("name", sorted(FUNCTIONS))
def test_activations_are_those_of_transformers(name):
    x = torch.linspace(-12, 12, 802).view(2, -1)
    wanted = ACT2FN[name](x)
    torch.testing.assert_close(activation(x, name), wanted, rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(gated_activation(x[:, :400], name), ACT2FN[name](x[:, :200]) * x[:, 200:400])


def test_every_activation_of_transformers_without_parameters_is_known():
    assert set(ACT2FN) - set(FUNCTIONS) <= {"prelu", "xielu"}
    with pytest.raises(ValueError, match=r"unknown activation 'geluu'.*gelu"):
        check_activation("geluu")
