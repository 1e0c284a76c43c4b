"""The reference attention against a loop over tokens in float64; the public function for every dtype."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.ops import attention
from phalanx.ops.attention import paged_attention, reference_attention


def loop(q, keys, values, first_position, scale, window, soft_cap, key_bias):
    """q [I, Hq, D] of one sequence over its whole context [L, Hkv, D], one row at a time."""
    out = torch.zeros(q.shape, dtype=torch.float64)
    group = q.shape[1] // keys.shape[1]
    for i in range(q.shape[0]):
        position = first_position + i
        begin = 0 if window is None else max(0, position - window + 1)
        for head in range(q.shape[1]):
            k, v = keys[begin : position + 1, head // group], values[begin : position + 1, head // group]
            scores = (k.double() @ q[i, head].double()) * scale
            if soft_cap is not None:
                scores = torch.tanh(scores / soft_cap) * soft_cap
            if key_bias is not None:
                scores = scores + key_bias[head, begin : position + 1].double()
            out[i, head] = scores.softmax(0) @ v.double()
    return out


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 12)), min_size=1, max_size=4),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 4),
    block_size=st.sampled_from([1, 3, 4]),
    window=st.sampled_from([None, 1, 4]),
    soft_cap=st.sampled_from([None, 2.0]),
    biased=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    at_once=st.sampled_from([1, 40, 1 << 25]),
)
def test_reference_equals_a_loop(sizes, kv_heads, group, block_size, window, soft_cap, biased, dtype, at_once):
    dim, padding = 8, 2
    torch.manual_seed(len(sizes))
    needed = [-(-(new + old) // block_size) for new, old in sizes]
    blocks = torch.randperm(sum(needed) + 1).tolist()
    k_cache = torch.full((len(blocks), block_size, kv_heads, dim), float("nan"), dtype=dtype)
    v_cache = k_cache.clone()
    table = torch.full((len(sizes), max([*needed, 1]) + 1), -1, dtype=torch.int32)
    q = torch.randn(sum(new for new, _ in sizes) + padding, kv_heads * group, dim).to(dtype)
    key_bias = torch.randn(q.shape[1], max(1, *(new + old for new, old in sizes))) if biased else None
    wanted, row = torch.zeros(q.shape, dtype=torch.float64), 0
    for s, (new, old) in enumerate(sizes):
        own = [blocks.pop() for _ in range(needed[s])]
        keys, values = torch.randn(2, new + old, kv_heads, dim).to(dtype)
        for position in range(0 if window is None else max(0, old - window + 1), new + old):
            block = table[s, position // block_size] = own[position // block_size]
            k_cache[block, position % block_size] = keys[position]
            v_cache[block, position % block_size] = values[position]
        wanted[row : row + new] = loop(q[row : row + new], keys, values, old, 0.3, window, soft_cap, key_bias)
        row += new
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "_SCORES_AT_ONCE", at_once)
        found = reference_attention(
            q,
            k_cache,
            v_cache,
            table,
            torch.tensor([0] + [new for new, _ in sizes]).cumsum(0).to(torch.int32),
            torch.tensor([new + old for new, old in sizes], dtype=torch.int32),
            scale=0.3,
            window=window,
            soft_cap=soft_cap,
            key_bias=key_bias,
            max_query_len=max(new for new, _ in sizes) + 1,
            max_seq_len=max(new + old for new, old in sizes) + 2,
        )
    assert found.dtype == dtype
    tolerance = 1e-2 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(found.double(), wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_every_float_dtype_is_served(dtype):
    q = torch.randn(3, 2, 8).to(dtype)
    k_cache, v_cache = torch.randn(2, 2, 4, 1, 8).to(dtype)
    table = torch.tensor([[1]], dtype=torch.int32)
    starts, lengths = torch.tensor([0, 3], dtype=torch.int32), torch.tensor([3], dtype=torch.int32)
    found = paged_attention(q, k_cache, v_cache, table, starts, lengths, scale=0.5, max_query_len=3, max_seq_len=3)
    wanted = loop(q, k_cache[1, :3], v_cache[1, :3], 0, 0.5, None, None, None)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-2, atol=1e-2)


def test_no_sequences_and_no_heads():
    cache = torch.zeros(2, 4, 1, 8)
    nothing = torch.zeros(0, 3, dtype=torch.int32)
    sizes = {"scale": 1.0, "max_query_len": 0, "max_seq_len": 0}
    starts = torch.zeros(1, dtype=torch.int32)
    for function in (paged_attention, reference_attention):
        assert function(torch.zeros(0, 2, 8), cache, cache, nothing, starts, nothing[:, 0], **sizes).shape == (0, 2, 8)
        padding = function(torch.randn(2, 2, 8), cache, cache, nothing, starts, nothing[:, 0], **sizes)
        assert torch.equal(padding, torch.zeros(2, 2, 8))
        headless = torch.zeros(2, 4, 0, 8)
        assert function(torch.zeros(2, 0, 8), headless, headless, nothing, starts, nothing[:, 0], **sizes).numel() == 0
