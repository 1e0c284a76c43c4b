"""LLM.stats: what runs, what waits, what the pool holds, and the counts."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from phalanx import LLM


def test_a_request_is_counted_from_its_arrival_to_its_end(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm(max_num_seqs=2, loop="plain")
    idle = llm.stats()
    assert (idle.running, idle.waiting, idle.kv_usage) == (0, 0, 0.0)
    names = [llm.add_request([5, 6, 7, 8, 9], {"max_tokens": 4, "ignore_eos": True}) for _ in range(3)]
    assert (llm.stats().running, llm.stats().waiting) == (0, 3)
    llm.step()
    at_work = llm.stats()
    assert (at_work.running, at_work.waiting, at_work.generated_tokens) == (2, 1, 2)
    # 5 prompt tokens in blocks of 4.
    assert at_work.total_blocks - at_work.free_blocks == 4
    assert at_work.kv_usage == pytest.approx(4 / 63)
    for name in names:
        llm.abort(name)
    done = llm.stats()
    assert (done.running, done.waiting, done.free_blocks) == (0, 0, idle.free_blocks)


def test_prefix_hits_are_counted_in_tokens(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm()
    for _ in range(2):
        llm.generate([list(range(10, 20))], max_tokens=3)
    stats = llm.stats()
    assert (stats.prefix_queries, stats.prefix_hits, stats.generated_tokens) == (20, 8, 6)


def test_preemptions_are_counted(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm(num_blocks=9, max_num_seqs=4)
    llm.generate([[3 + n, 4, 5] for n in range(4)], max_tokens=20, ignore_eos=True)
    stats = llm.stats()
    assert stats.preemptions > 0 and stats.generated_tokens == 80
