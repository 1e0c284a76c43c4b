"""The native attention and rope against the plain PyTorch ones, on ragged batches over poisoned caches."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from phalanx.ops import registry
from phalanx.ops.attention import reference_attention
from phalanx.ops.cpu.library import library
from phalanx.ops.rope import reference_rope_write_kv

pytestmark = pytest.mark.skipif(library() is None, reason="no C++ compiler")

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


@dataclass
class Case:
    """A ragged batch whose cache holds NaN wherever no new token may look."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    block_table: Tensor
    cu_seqlens_q: Tensor
    seq_lens: Tensor
    window: int | None
    sizes: list[tuple[int, int]]

    def run(self, function, **options) -> Tensor:
        return function(
            self.q,
            self.k_cache,
            self.v_cache,
            self.block_table,
            self.cu_seqlens_q,
            self.seq_lens,
            scale=self.q.shape[-1] ** -0.5,
            window=self.window,
            max_query_len=max((new for new, _ in self.sizes), default=0),
            max_seq_len=max((new + old for new, old in self.sizes), default=0),
            **options,
        )


def make_case(sizes, kv_heads, group, dim, block_size, window=None, dtype=torch.float32, seed=0, padding=0) -> Case:
    generator = torch.Generator().manual_seed(seed)

    def random(*shape):
        return torch.randn(*shape, generator=generator).to(dtype)

    lengths = [new + old for new, old in sizes]
    needed = [-(-length // block_size) for length in lengths]
    blocks = torch.randperm(sum(needed) + 2, generator=generator).to(torch.int32)
    # The caches are views with room between blocks and heads of K and V side by side, as a pool may hold them.
    pool = torch.full((len(blocks), block_size, kv_heads, 2 * dim + 3), float("nan"), dtype=dtype)
    k_cache, v_cache = pool[..., :dim], pool[..., dim : 2 * dim]
    table = torch.full((len(sizes), max(needed, default=0) + 1), 1 << 30, dtype=torch.int32)
    used = 0
    for s, ((new, old), count) in enumerate(zip(sizes, needed, strict=True)):
        first = 0 if window is None else max(0, old - window + 1)
        for position in range(first, new + old):
            table[s, position // block_size] = blocks[used + position // block_size]
            slot = (int(table[s, position // block_size]), position % block_size)
            k_cache[slot], v_cache[slot] = random(kv_heads, dim), random(kv_heads, dim)
        used += count
    tokens = sum(new for new, _ in sizes)
    fused = random(tokens + padding, kv_heads * group + 2 * kv_heads, dim)
    starts = torch.tensor([0] + [new for new, _ in sizes]).cumsum(0).to(torch.int32)
    lens = torch.tensor(lengths, dtype=torch.int32)
    return Case(fused[:, : kv_heads * group], k_cache, v_cache, table, starts, lens, window, sizes)


def native(op: str, dtype: torch.dtype = torch.float32):
    return registry.select(op, device="cpu", dtype=dtype, forced="native")


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 150)), min_size=0, max_size=5),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 8),
    dim=st.sampled_from([16, 24, 64, 80, 128, 256, 7]),
    block_size=st.sampled_from([1, 3, 16, 64]),
    window=st.sampled_from([None, 1, 5, 64, 100]),
    soft_cap=st.sampled_from([None, 5.0]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 99),
)
def test_attention_equals_reference(sizes, kv_heads, group, dim, block_size, window, soft_cap, dtype, seed):
    case = make_case(sizes, kv_heads, group, dim, block_size, window, dtype, seed, padding=seed % 3)
    found = case.run(native("attention", dtype), soft_cap=soft_cap)
    wanted = case.run(reference_attention, soft_cap=soft_cap)
    assert found.shape == wanted.shape and found.is_contiguous()
    torch.testing.assert_close(found, wanted, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 70])
@pytest.mark.parametrize(("group", "dim"), [(3, 64), (1, 24), (8, 80)])
def test_a_row_does_not_depend_on_its_batch(dtype, window, group, dim):
    """Chunked or whole, alone or beside others, on one thread or two: bit-equal."""
    whole = make_case([(150, 0), (9, 70)], 2, group, dim, 16, window, dtype, seed=3)
    wanted = whole.run(native("attention", dtype))
    for begin, end in ((0, 1), (1, 64), (60, 90), (64, 149), (149, 150)):
        part = Case(
            whole.q[begin:end],
            whole.k_cache,
            whole.v_cache,
            whole.block_table[:1],
            torch.tensor([0, end - begin], dtype=torch.int32),
            torch.tensor([end], dtype=torch.int32),
            window,
            [(end - begin, begin)],
        )
        assert torch.equal(part.run(native("attention", dtype)), wanted[begin:end])
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        assert torch.equal(whole.run(native("attention", dtype)), wanted)
    finally:
        torch.set_num_threads(threads)


def test_nothing_leaks_between_calls():
    """What one call left in the kernels' own memory, NaN included, is not in the next one's result."""
    for dtype in (torch.float32, torch.bfloat16):
        for dim in (64, 24):
            case = make_case([(40, 30), (1, 5)], 2, 2, dim, 16, dtype=dtype)
            wanted = case.run(native("attention", dtype))
            poison = make_case([(40, 100)], 2, 2, dim, 16, dtype=dtype)
            poison.q = torch.full_like(poison.q, float("nan"))
            poison.k_cache.fill_(float("nan"))
            poison.v_cache.fill_(float("nan"))
            assert poison.run(native("attention", dtype)).isnan().all()
            assert torch.equal(case.run(native("attention", dtype)), wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_of_the_result_is_written_and_nothing_else(dtype, monkeypatch):
    case = make_case([(5, 9), (0, 3), (1, 70)], 2, 3, 24, 4, dtype=dtype, padding=2)
    guarded = []

    def guarded_empty(*shape, dtype):
        size = torch.Size(shape).numel()
        guarded.append(torch.full((size + 64,), float("nan"), dtype=dtype))
        return guarded[-1][32 : 32 + size].view(shape)

    function = native("attention", dtype)
    wanted = case.run(reference_attention)
    monkeypatch.setattr(torch, "empty", guarded_empty)
    found = case.run(function)
    monkeypatch.undo()
    torch.testing.assert_close(found, wanted, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    assert guarded[0][:32].isnan().all() and guarded[0][-32:].isnan().all()


def test_large_scores_stay_finite():
    case = make_case([(70, 80)], 1, 2, 32, 16)
    case.q = case.q * 1e4
    torch.testing.assert_close(case.run(native("attention")), case.run(reference_attention), rtol=1e-4, atol=1e-4)


def test_a_rank_without_heads():
    empty = make_case([(3, 0)], 0, 1, 16, 4)
    assert empty.run(native("attention")).shape == (3, 0, 16)


def test_attention_refuses_caches_that_do_not_fit():
    case = make_case([(3, 0)], 2, 2, 16, 4)
    case.v_cache = case.v_cache.to(torch.bfloat16)
    with pytest.raises(ValueError, match="caches must be of"):
        case.run(native("attention"))
    case.v_cache = case.v_cache[..., :8]
    with pytest.raises(ValueError, match="caches of"):
        case.run(native("attention"))


@settings(max_examples=30, deadline=None)
@given(
    tokens=st.integers(0, 20),
    kv_heads=st.integers(0, 3),
    group=st.integers(1, 4),
    dim=st.sampled_from([8, 16, 64, 80]),
    rotated=st.sampled_from([0.0, 0.5, 1.0]),
    block_size=st.sampled_from([1, 5, 16]),
    interleaved=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_rope_and_cache_write_equal_reference(tokens, kv_heads, group, dim, rotated, block_size, interleaved, dtype):
    torch.manual_seed(tokens)
    heads = kv_heads * group
    fused = torch.randn(tokens, heads + 2 * kv_heads, dim).to(dtype)
    q, k, v = fused[:, :heads], fused[:, heads : heads + kv_heads], fused[:, heads + kv_heads :]
    half = int(dim * rotated / 2)
    angles = torch.rand(tokens, half) * 100
    cos, sin = (angles.cos(), angles.sin()) if half else (None, None)
    slots = torch.randperm(10 * block_size + tokens)[:tokens]
    blocks = 11 + tokens // block_size

    def caches():
        pool = torch.full((blocks, block_size, kv_heads, 2 * dim + 1), 7.0, dtype=dtype)
        return pool[..., :dim], pool[..., dim : 2 * dim], pool

    k_wanted, v_wanted, all_wanted = caches()
    wanted = reference_rope_write_kv(q, k, v, cos, sin, slots, k_wanted, v_wanted, interleaved=interleaved)
    k_found, v_found, all_found = caches()
    found = native("rope_write_kv", dtype)(q, k, v, cos, sin, slots, k_found, v_found, interleaved=interleaved)
    tolerance = {"rtol": TOLERANCE[dtype], "atol": 1e-5}
    torch.testing.assert_close(found, wanted, **tolerance)
    # All of the pool: nothing but the slots was written.
    torch.testing.assert_close(all_found, all_wanted, **tolerance)


def test_rope_refuses_more_dimensions_than_a_head_has():
    x = torch.randn(2, 1, 8)
    cache = torch.zeros(1, 4, 1, 8)
    for implementation in ("native", "reference"):
        rope = registry.select("rope_write_kv", device="cpu", dtype=torch.float32, forced=implementation)
        with pytest.raises(ValueError, match="rope of"):
            rope(x, x, x, torch.ones(2, 5), torch.ones(2, 5), torch.tensor([0, 1]), cache, cache.clone())
