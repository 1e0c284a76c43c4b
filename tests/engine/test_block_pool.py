"""BlockPool and PrefixCache under random use: the books balance, and content is what the index says."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from phalanx.engine.block_pool import DUMMY_BLOCK, BlockPool
from phalanx.engine.prefix_cache import Entry, PrefixCache

NUM_BLOCKS = 8


class Chains(RuleBasedStateMachine):
    """Readers hold chains of blocks. `truth` is what each block was last filled with, behind which tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = PrefixCache()
        self.pool = BlockPool(NUM_BLOCKS, self.cache.remove)
        self.chains: list[tuple[list[int], list[Entry]]] = []
        self.truth: dict[int, tuple[tuple[int, ...], ...]] = {}

    @rule(tokens=st.lists(st.integers(0, 2), min_size=1, max_size=4))
    def read(self, tokens: list[int]) -> None:
        """Follows the index as far as it goes, then fills blocks of its own."""
        blocks, entries = [], []
        for place, token in enumerate(tokens):
            entry = self.cache.find("m", entries[-1] if entries else None, [token])
            if entry is None:
                break
            assert self.truth[entry.block] == tuple((t,) for t in tokens[: place + 1])
            self.pool.retain(entry.block)
            blocks.append(entry.block)
            entries.append(entry)
        missing = len(tokens) - len(blocks)
        if missing > self.pool.num_free:
            with pytest.raises(ValueError, match="are free"):
                self.pool.allocate(missing)
            self.pool.release(reversed(blocks))
            return
        for block in self.pool.allocate(missing):
            assert block != DUMMY_BLOCK
            assert all(block not in held for held, _ in self.chains)
            self.truth[block] = tuple((t,) for t in tokens[: len(blocks) + 1])
            blocks.append(block)
        self.chains.append((blocks, entries))

    @precondition(lambda self: self.chains)
    @rule(data=st.data())
    def fill(self, data: st.DataObject) -> None:
        """A chain's next block is full: it enters the index."""
        blocks, entries = data.draw(st.sampled_from(self.chains))
        if len(entries) < len(blocks):
            block = blocks[len(entries)]
            token = self.truth[block][-1]
            entry = self.cache.insert("m", entries[-1] if entries else None, list(token), block)
            if entry.block == block:
                self.pool.keep(block)
            entries.append(entry)

    @precondition(lambda self: self.chains)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        chain = data.draw(st.sampled_from(self.chains))
        self.chains.remove(chain)
        self.pool.release(reversed(chain[0]))

    @rule()
    def forget(self) -> None:
        self.pool.drop_cached()

    @invariant()
    def books_balance(self) -> None:
        self.pool.check()
        self.cache.check()
        assert self.pool.num_used + self.pool.num_free == NUM_BLOCKS - 1
        assert self.cache.blocks() == self.pool.kept
        for block in range(1, NUM_BLOCKS):
            assert self.pool.users(block) == sum(held.count(block) for held, _ in self.chains)


Chains.TestCase.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
TestChains = Chains.TestCase


def test_errors_name_the_block() -> None:
    pool = BlockPool(4)
    (block,) = pool.allocate(1)
    pool.release([block])
    with pytest.raises(ValueError, match=f"block {block} was released more often"):
        pool.release([block])
    with pytest.raises(ValueError, match=f"block {block} is free, it cannot be shared"):
        pool.retain(block)
    with pytest.raises(ValueError, match="4 blocks were asked for, 3 of 3 are free"):
        pool.allocate(4)
    with pytest.raises(ValueError, match="-1 blocks"):
        pool.allocate(-1)
    with pytest.raises(ValueError, match="block 0 was released"):
        pool.release([DUMMY_BLOCK])
    with pytest.raises(ValueError, match="2 blocks at least"):
        BlockPool(1)


def test_a_block_released_twice_in_one_call_is_refused() -> None:
    pool = BlockPool(4)
    (block,) = pool.allocate(1)
    with pytest.raises(ValueError, match="more often"):
        pool.release([block, block])
    pool.check()


def test_the_oldest_cached_block_goes_first() -> None:
    gone: list[int] = []
    pool = BlockPool(4, gone.append)
    blocks = pool.allocate(3)
    for block in blocks:
        pool.keep(block)
    pool.release([blocks[2], blocks[0], blocks[1]])
    pool.allocate(2)
    assert gone == [blocks[2], blocks[0]]


def test_a_chain_is_part_of_the_key() -> None:
    cache = PrefixCache()
    first = cache.insert("m", None, [1], 1)
    cache.insert("m", first, [2], 2)
    assert cache.find("m", None, [2]) is None
    assert cache.find("other", None, [1]) is None
    assert cache.find("m", None, [1], [1]) is None
    with pytest.raises(ValueError, match="block 2 is in the index already"):
        cache.insert("m", None, [9], 2)
