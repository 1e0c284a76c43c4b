import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.layout.heads import deal, kv_copies, kv_heads, query_heads

WORLDS = st.integers(1, 16)


@settings(deadline=None)
@given(st.integers(0, 100), WORLDS)
def test_deal_covers_all_units_in_order_and_first_ranks_get_one_more(units, world):
    shares = [deal(units, rank, world) for rank in range(world)]
    assert [unit for share in shares for unit in share] == list(range(units))
    sizes = [len(share) for share in shares]
    assert sizes == sorted(sizes, reverse=True) and max(sizes) - min(sizes) <= 1


@settings(deadline=None)
@given(st.integers(1, 10), st.integers(1, 8), WORLDS)
def test_every_rank_is_a_uniform_group_query_problem(kv, group, world):
    queries = [query_heads(kv * group, kv, rank, world) for rank in range(world)]
    keys = [kv_heads(kv * group, kv, rank, world) for rank in range(world)]
    assert [head for share in queries for head in share] == list(range(kv * group))
    for query, key in zip(queries, keys, strict=True):
        assert {head // group for head in query} == set(key)
        if key:
            local = len(query) // len(key)
            assert len(query) == local * len(key)
            assert [head // group for head in query] == [head for head in key for _ in range(local)]


@settings(deadline=None)
@given(st.integers(1, 10), st.integers(1, 8), WORLDS)
def test_copies_counts_the_ranks_that_hold_a_kv_head(kv, group, world):
    keys = [kv_heads(kv * group, kv, rank, world) for rank in range(world)]
    for rank, key in enumerate(keys):
        for head in key:
            assert kv_copies(kv * group, kv, rank, world) == sum(head in other for other in keys)


def test_shares_that_people_know():
    assert [len(query_heads(9, 3, rank, 2)) for rank in range(2)] == [6, 3]
    assert [list(kv_heads(8, 2, rank, 4)) for rank in range(4)] == [[0], [0], [1], [1]]
    assert [list(kv_heads(2, 1, rank, 4)) for rank in range(4)] == [[0], [0], [], []]


@pytest.mark.parametrize(
    "call", [lambda: deal(4, 2, 2), lambda: query_heads(4, 2, -1, 2), lambda: kv_heads(4, 2, 0, 0)]
)
def test_a_rank_outside_the_world_is_refused(call):
    with pytest.raises(ValueError, match="world"):
        call()


def test_heads_that_do_not_group_are_refused():
    with pytest.raises(ValueError, match="10 query heads cannot share 4 KV heads"):
        query_heads(10, 4, 0, 2)
    with pytest.raises(ValueError, match="-1 units"):
        deal(-1, 0, 1)
