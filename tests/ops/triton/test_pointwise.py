"""Fused pointwise kernels against the plain references: random shapes, strided views, poisoned outputs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from phalanx.ops.activation import reference_activation, reference_gated_activation
from phalanx.ops.norm import reference_add_rms_norm, reference_layer_norm, reference_rms_norm
from phalanx.ops.rope import reference_rope_write_kv
from phalanx.ops.sampling import reference_rank_likeliest, reference_take_likeliest, sample
from phalanx.ops.step_inputs import reference_decode_inputs
from phalanx.ops.token_mask import reference_mask_tokens
from phalanx.ops.triton.activation import activation, gated_activation
from phalanx.ops.triton.activation_kernels import KINDS
from phalanx.ops.triton.greedy import rank_likeliest, take_likeliest
from phalanx.ops.triton.norm import add_rms_norm, layer_norm, rms_norm
from phalanx.ops.triton.rope import rope_write_kv
from phalanx.ops.triton.step_inputs import decode_inputs
from phalanx.ops.triton.token_mask import mask_tokens
from tests.ops.triton import attention_case  # noqa: F401  (completes the interpreter)

BOUND = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
DTYPES = list(BOUND)


def close(got: torch.Tensor, expected: torch.Tensor) -> None:
    assert got.shape == expected.shape and got.dtype == expected.dtype
    error = (got.double() - expected.double()).norm() / expected.double().norm().clamp_min(1e-30)
    assert float(error) < BOUND[expected.dtype]


@pytest.fixture(autouse=True)
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a kernel does not write stays NaN, or a number that stands out."""
    empty = torch.empty

    def poisoned(*args: Any, **settings: Any) -> torch.Tensor:
        made = empty(*args, **settings)
        return made.fill_(float("nan") if made.is_floating_point() else 7)

    monkeypatch.setattr(torch, "empty", poisoned)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 64), (5, 96), (3, 1000), (2, 3, 24), (64,)])
def test_norms(kernel_device: torch.device, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    width = shape[-1]
    x, residual = (torch.randn(shape, device=kernel_device).to(dtype) for _ in range(2))
    weight, bias = (torch.randn(width, device=kernel_device) for _ in range(2))
    close(rms_norm(x, weight, 1e-5), reference_rms_norm(x, weight, 1e-5))
    close(layer_norm(x + 3, weight, bias, 1e-5), reference_layer_norm(x + 3, weight, bias, 1e-5))
    close(layer_norm(x, None, None, 1e-5), reference_layer_norm(x, None, None, 1e-5))
    for got, expected in zip(
        add_rms_norm(x, residual, weight.to(dtype), 1e-6),
        reference_add_rms_norm(x, residual, weight.to(dtype), 1e-6),
        strict=True,
    ):
        close(got, expected)


def test_norm_of_heads_in_a_fused_projection(kernel_device: torch.device) -> None:
    fused = torch.randn(4, 9 * 16, device=kernel_device).view(4, 9, 16)
    heads, weight = fused[:, 2:7], torch.randn(16, device=kernel_device)
    close(rms_norm(heads, weight, 1e-5), reference_rms_norm(heads, weight, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", [*KINDS, "hardswish"])
def test_activations(kernel_device: torch.device, dtype: torch.dtype, name: str) -> None:
    x = (3 * torch.randn(3, 2 * 1030, device=kernel_device)).to(dtype)
    close(activation(x, name), reference_activation(x, name))
    close(gated_activation(x, name), reference_gated_activation(x, name))


ROPES = [
    {"heads": 4, "kv_heads": 2, "dim": 16, "half": 8},
    {"heads": 3, "kv_heads": 1, "dim": 24, "half": 6, "interleaved": True},
    {"heads": 2, "kv_heads": 2, "dim": 20, "half": 0},
    {"heads": 2, "kv_heads": 1, "dim": 32, "half": 16, "normed": True},
    {"heads": 2, "kv_heads": 1, "dim": 32, "half": 4, "normed": True, "interleaved": True},
]


@pytest.mark.parametrize("cache", ["same", "fp8"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", ROPES)
def test_rope(kernel_device: torch.device, dtype: torch.dtype, case: dict[str, Any], cache: str) -> None:
    tokens, block_size, blocks = 5, 3, 7
    heads, kv_heads, dim, half = (case[name] for name in ("heads", "kv_heads", "dim", "half"))
    fused = torch.randn(tokens, heads + 2 * kv_heads, dim, device=kernel_device).to(dtype)
    q, k, v = fused.split([heads, kv_heads, kv_heads], 1)
    cos, sin = (torch.randn(tokens, half, device=kernel_device) for _ in range(2)) if half else (None, None)
    slots = torch.randperm(blocks * block_size, device=kernel_device)[:tokens]
    kind = torch.float8_e4m3fn if cache == "fp8" else dtype
    # As in the pool: each block holds more than this layer's keys.
    pool = torch.zeros(blocks, 4, block_size, kv_heads, dim, device=kernel_device).to(kind)
    got_cache, expected_cache = pool.clone(), pool.clone()
    options: dict[str, Any] = {"interleaved": case.get("interleaved", False)}
    if case.get("normed"):
        weights = [torch.randn(dim, device=kernel_device) for _ in range(2)]
        options |= {"q_norm": weights[0], "k_norm": weights[1], "norm_eps": 1e-6}
    got = rope_write_kv(q, k, v, cos, sin, slots, got_cache[:, 1], got_cache[:, 2], **options)
    close(got, reference_rope_write_kv(q, k, v, cos, sin, slots, expected_cache[:, 1], expected_cache[:, 2], **options))
    close(got_cache.to(dtype), expected_cache.to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [10, 4096, 9001])
def test_greedy(kernel_device: torch.device, dtype: torch.dtype, vocab: int) -> None:
    logits = torch.randn(6, vocab, device=kernel_device).to(dtype)
    logits[1, 3] = float("nan")
    logits[2] = float("-inf")
    logits[3, 5] = float("inf")
    # The first of equals.
    logits[4, [2, 7]] = 100.0
    slots = torch.tensor([2, 0, 1, -1, 4, 3], device=kernel_device)
    columns = torch.tensor([0, 1, 2, 0, 3, 1], device=kernel_device)
    table = torch.full((5, 6), 9, device=kernel_device)
    expected_table = table.clone()
    expected = sample(logits.float(), None)
    assert expected[4] == 2
    # A vocabulary that is whole, and one that two ranks have a part of each.
    for cut in (0, 7, vocab // 2):
        for rank, take, into in (
            (rank_likeliest, take_likeliest, table),
            (reference_rank_likeliest, reference_take_likeliest, expected_table),
        ):
            keys = torch.cat([rank(logits[:, :cut], 0), rank(logits[:, cut:], cut)], 1)
            assert torch.equal(take(keys, into, slots, columns), expected)
        assert torch.equal(table[:, :-1], expected_table[:, :-1])
    assert table[2, 0] == expected[0] and bool((table[1, :3] == torch.tensor([9, 9, 0], device=kernel_device)).all())


def test_decode_inputs(kernel_device: torch.device) -> None:
    slots = torch.tensor([3, -1, 0, 2], device=kernel_device)
    positions = torch.tensor([0, 0, 11, 4], device=kernel_device)
    tokens = torch.arange(4 * 13, device=kernel_device).view(4, 13)
    tables = [torch.randint(1, 50, (4, 3), dtype=torch.int32, device=kernel_device) for _ in range(2)]
    got = decode_inputs(slots, positions, tokens, tables, 4)
    expected = reference_decode_inputs(slots, positions, tokens, tables, 4)
    assert torch.equal(got.input_ids, expected.input_ids) and torch.equal(got.seq_lens, expected.seq_lens)
    for group in range(2):
        assert torch.equal(got.slot_mapping[group], expected.slot_mapping[group])
        for row, length in enumerate(expected.seq_lens.tolist()):
            used = slice(0, -(-length // 4))
            assert torch.equal(got.block_tables[group][row, used], expected.block_tables[group][row, used])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [10, 2048, 5001])
def test_mask_tokens(kernel_device: torch.device, dtype: torch.dtype, vocab: int) -> None:
    logits = torch.randn(5, vocab, device=kernel_device).to(dtype)
    rows = torch.tensor([3, 0, 4], device=kernel_device)
    bits = torch.randint(-(2**31), 2**31, (3, -(-vocab // 32)), device=kernel_device).to(torch.int32)
    bits[1] = 0
    expected = logits.clone()
    for row, mask in zip(rows.tolist(), bits.tolist(), strict=True):
        for token in range(vocab):
            if not (mask[token // 32] >> (token % 32)) & 1:
                expected[row, token] = float("-inf")
    assert torch.equal(reference_mask_tokens(logits.clone(), rows, bits), expected)
    assert torch.equal(mask_tokens(logits, rows, bits), expected)
