import json
from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.layout import (
    Block,
    Heads,
    Partition,
    attention_blocks,
    grouped_attention_blocks,
    local_shape,
    merge,
    pieces,
    shard,
)

WORLDS = st.integers(1, 16)


@st.composite
def plain_blocks(draw):
    units = draw(st.lists(st.tuples(st.integers(0, 6), st.integers(1, 4), st.booleans()), min_size=1, max_size=4))
    return tuple(Block(count * unit, unit, copied=copied) for count, unit, copied in units)


@st.composite
def head_blocks(draw):
    kv, group, dim = draw(st.integers(1, 5)), draw(st.integers(1, 5)), draw(st.integers(1, 3))
    make = draw(st.sampled_from([attention_blocks, grouped_attention_blocks]))
    blocks = make(kv * group, kv, dim)
    return draw(st.sampled_from([blocks, blocks[:1] if make is attention_blocks else blocks]))


@st.composite
def cut_tensors(draw):
    """(partition, shape) that fit each other."""
    kind = draw(st.sampled_from(["replicate", "column", "row", "vocab"]))
    if kind == "replicate":
        return Partition.replicate(), tuple(draw(st.lists(st.integers(0, 4), max_size=3)))
    if kind == "vocab":
        unit = draw(st.integers(1, 3))
        return Partition.vocab(unit=unit), (unit * draw(st.integers(0, 20)), draw(st.integers(0, 3)))
    blocks = draw(st.one_of(st.just(()), plain_blocks(), head_blocks()))
    unit = 1 if blocks else draw(st.integers(1, 3))
    length = sum(block.size for block in blocks) if blocks else unit * draw(st.integers(1, 8))
    view, axis = (), 0
    if length and draw(st.booleans()):
        before, after = (draw(st.lists(st.integers(1, 3), max_size=2)) for _ in range(2))
        view, axis = (*before, length, *after), len(before)
    cut = prod(view) if view else length
    others = draw(st.lists(st.integers(1, 3), min_size=kind == "row", max_size=2))
    dims = len(others) + 1
    dim = draw(st.integers(-dims, dims - 1))
    others.insert(dim % dims, cut)
    make = Partition.column if kind == "column" else Partition.row
    return make(blocks, unit=unit, view=view, axis=axis, dim=dim), tuple(others)


def numbered(shape):
    return torch.arange(prod(shape)).reshape(shape)


@settings(max_examples=300, deadline=None)
@given(cut_tensors(), WORLDS)
def test_merge_is_the_inverse_of_shard(cut, world):
    partition, shape = cut
    whole = numbered(shape)
    shards = [shard(whole, partition, rank, world) for rank in range(world)]
    for rank, part in enumerate(shards):
        assert tuple(part.shape) == local_shape(partition, shape, rank, world)
        assert part.is_contiguous()
    assert torch.equal(merge(shards, partition, shape), whole)


@settings(max_examples=300, deadline=None)
@given(cut_tensors(), WORLDS)
def test_pieces_cover_every_element_as_often_as_they_say(cut, world):
    partition, shape = cut
    seen, promised = torch.zeros(shape, dtype=torch.int), torch.zeros(shape, dtype=torch.int)
    for rank in range(world):
        local = torch.zeros(local_shape(partition, shape, rank, world), dtype=torch.int)
        for global_slices, local_slices, copies in pieces(partition, shape, rank, world):
            seen[global_slices] += 1
            promised[global_slices] = copies
            local[local_slices] += 1
        assert bool((local == 1).all()), "the pieces of a rank fill its shard, without overlap"
    assert torch.equal(seen, promised) and bool((seen >= 1).all())


@settings(deadline=None)
@given(cut_tensors())
def test_json_round_trip(cut):
    partition, _ = cut
    again = Partition.from_json(json.loads(json.dumps(partition.to_json())))
    assert again == partition and hash(again) == hash(partition)


def test_interleaved_and_stacked_layouts_differ():
    whole = torch.arange(12)
    per_head = Partition.column(view=(2, 3, 2), axis=0)
    stacked = Partition.column(view=(3, 2, 2), axis=1)
    assert shard(whole, per_head, 1, 2).tolist() == [6, 7, 8, 9, 10, 11]
    assert shard(whole, stacked, 1, 2).tolist() == [2, 3, 6, 7, 10, 11]


def test_stacked_qkv_of_uneven_heads():
    partition = Partition.column(attention_blocks(9, 3, 2))
    assert [local_shape(partition, (30, 5), rank, 2) for rank in range(2)] == [(20, 5), (10, 5)]
    assert shard(torch.arange(30), partition, 1, 2).tolist() == [12, 13, 14, 15, 16, 17, 22, 23, 28, 29]


def test_grouped_qkv_with_more_ranks_than_kv_heads_copies_k_and_v():
    partition = Partition.column(grouped_attention_blocks(4, 2, 1))
    shards = [shard(torch.arange(8), partition, rank, 4).tolist() for rank in range(4)]
    assert shards == [[0, 2, 3], [1, 2, 3], [4, 6, 7], [5, 6, 7]]
    assert [piece.copies for piece in pieces(partition, (8,), 0, 4)] == [1, 2]


def test_a_rank_may_own_nothing():
    partition = Partition.column(attention_blocks(2, 1, 4))
    assert local_shape(partition, (16, 3), 2, 4) == (0, 3)
    assert pieces(partition, (16, 3), 2, 4) == []
    assert shard(torch.ones(16, 3), partition, 2, 4).shape == (0, 3)


def test_v_may_have_its_own_head_size():
    q, k, v = attention_blocks(4, 2, 8, v_head_dim=4)
    assert (q.size, k.size, v.size) == (32, 16, 8)


class Lazy:
    """A tensor that remembers what was read of it."""

    def __init__(self, whole):
        self.whole, self.reads = whole, []
        self.shape, self.dtype = whole.shape, whole.dtype

    def __getitem__(self, index):
        self.reads.append(index)
        return self.whole[index]


@settings(deadline=None)
@given(cut_tensors(), WORLDS)
def test_shard_reads_only_its_pieces_of_a_lazy_tensor(cut, world):
    partition, shape = cut
    for rank in range(world):
        lazy = Lazy(numbered(shape))
        part = shard(lazy, partition, rank, world)
        assert torch.equal(part, shard(lazy.whole, partition, rank, world))
        assert lazy.reads == [piece.global_slices for piece in pieces(partition, shape, rank, world)]


def test_a_shard_does_not_keep_the_whole_tensor_alive():
    part = shard(torch.nn.Parameter(torch.ones(100, 4)), Partition.column(), 0, 4)
    assert part.untyped_storage().nbytes() == part.numel() * 4
    assert not part.requires_grad


def test_whole_runs_are_one_piece():
    assert len(pieces(Partition.column(attention_blocks(8, 2, 4), view=(2, 48), axis=1), (96, 3), 0, 1)) == 1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Block(10, 4), "10 elements is not a whole number of units of 4"),
        (lambda: Block(-1), "size >= 0"),
        (lambda: Block(4, copied=True, heads=Heads("kv", 4, 2, 2)), "not both"),
        (lambda: Block(6, heads=Heads("kv", 4, 2, 2)), "does not hold whole heads"),
        (lambda: Heads("keys", 4, 2, 2), "unknown role 'keys'"),
        (lambda: Heads("kv", 5, 2, 2), "5 query heads cannot share 2 KV heads"),
        (lambda: Heads("kv", 4, 2, 0), "head_dim 0"),
        (lambda: Partition("diagonal"), "unknown kind of partition 'diagonal'"),
        (lambda: Partition.column(view=(2, 3), axis=2), "axis 2"),
        (lambda: Partition.column(view=(2, -1)), "positive sizes"),
        (lambda: Partition.column([Block(4)], view=(3, 2)), "sum to 4, but the cut axis has 3"),
        (lambda: Partition.column([Block(4)], unit=2), "given to the blocks"),
        (lambda: Partition.from_json({"kind": "row"}), "not a partition written by to_json"),
    ],
)
def test_impossible_partitions_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("partition", "shape", "rank", "world", "message"),
    [
        (Partition.column(), (4,), 2, 2, "rank 2 is outside a world of 2"),
        (Partition.replicate(), (4,), 0, 0, "world must be at least 1"),
        (Partition.row(), (4,), 0, 2, "bias of a row layer is replicated"),
        (Partition.column(dim=2), (4, 4), 0, 2, "dim 2, which shape"),
        (Partition.column(), (), 0, 2, "dim 0, which shape"),
        (Partition.column([Block(3), Block(2)]), (4, 4), 0, 2, "sum to 5, but the cut axis has 4"),
        (Partition.column(unit=3), (4, 4), 0, 2, "units of 3"),
        (Partition.column(view=(2, 3)), (4, 4), 0, 2, r"view \(2, 3\) has 6 elements"),
        (Partition.column(attention_blocks(4, 4, 2, unit=4)), (24, 4), 0, 4, "units of 4 must stay whole"),
    ],
)
def test_misfits_are_refused(partition, shape, rank, world, message):
    for function in (pieces, local_shape):
        with pytest.raises(ValueError, match=message):
            function(partition, shape, rank, world)


def test_merge_refuses_wrong_shards():
    with pytest.raises(ValueError, match="got none"):
        merge([], Partition.column(), (4,))
    with pytest.raises(ValueError, match=r"shard 1 of 2 .* needs torch.float32 \(1, 2\)"):
        merge([torch.ones(2, 2), torch.ones(2, 2)], Partition.column(), (3, 2))
    with pytest.raises(ValueError, match=r"shard 1 of 2 is torch\.float64"):
        merge([torch.ones(2, 2), torch.ones(2, 2).double()], Partition.column(), (4, 2))
