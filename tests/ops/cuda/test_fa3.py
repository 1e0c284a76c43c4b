"""What FlashAttention 3 is called with, and what is made of its output; the module itself runs on Hopper GPUs only."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch

from phalanx.ops.cuda import fa3


@pytest.fixture
def calls(monkeypatch):
    """The keyword arguments of each call; every output is NaN."""
    seen = []

    def flash_attn_with_kvcache(q, k_cache, v_cache, **options):
        seen.append(options)
        return torch.full_like(q, float("nan"))

    module = SimpleNamespace(flash_attn_with_kvcache=flash_attn_with_kvcache)
    monkeypatch.setitem(sys.modules, "flash_attn_interface", module)
    fa3._kernel.cache_clear()
    yield seen
    fa3._kernel.cache_clear()


def attend(q: torch.Tensor, **options) -> torch.Tensor:
    cache = torch.zeros(2, 16, 1, q.shape[2], dtype=q.dtype)
    table = torch.zeros(1, 1, dtype=torch.int32)
    starts, lengths = torch.tensor([0, 2], dtype=torch.int32), torch.tensor([5], dtype=torch.int32)
    sizes = {"scale": 0.5, "max_query_len": 2, "max_seq_len": 5}
    return fa3.attention(q, cache, cache, table, starts, lengths, **sizes, **options)


def test_padding_is_cleared_and_the_window_counts_the_token_itself(calls):
    out = attend(torch.zeros(3, 2, 64, dtype=torch.bfloat16), window=4)
    assert out[:2].isnan().all() and torch.equal(out[2], torch.zeros(2, 64, dtype=torch.bfloat16))
    attend(torch.zeros(2, 2, 64, dtype=torch.bfloat16))
    assert [call["window_size"] for call in calls] == [(3, 0), (-1, -1)]
    assert all(call["causal"] and call["softmax_scale"] == 0.5 for call in calls)


def test_what_it_lacks_is_refused():
    with pytest.raises(ValueError, match="no soft cap"):
        attend(torch.zeros(2, 2, 64, dtype=torch.bfloat16), soft_cap=3.0)
    with pytest.raises(ValueError, match="64, 128 or 256; got 96"):
        attend(torch.zeros(2, 2, 96, dtype=torch.bfloat16))
