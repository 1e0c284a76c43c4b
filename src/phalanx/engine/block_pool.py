"""BlockPool: which KV blocks are free, in use, or kept for reuse. Block 0 is the dummy that padding writes to."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable

DUMMY_BLOCK = 0


class BlockPool:
    """Hands out block ids, counts their users, and keeps reusable ones as long as there is room.

    At every moment ``free + used + cached == num_blocks - 1``: *used* blocks have users, *cached* ones have none but
    content that the prefix index knows, *free* ones neither. Cached blocks are given up oldest first.

    Args:
        num_blocks: all blocks, the dummy included; at least 2.
        on_evict: told the id of a cached block whose content is given up.
    """

    def __init__(self, num_blocks: int, on_evict: Callable[[int], None] | None = None) -> None:
        if num_blocks < 2:
            raise ValueError(f"a pool needs 2 blocks at least (one is the dummy), given {num_blocks}")
        self.num_blocks = num_blocks
        self.on_evict = on_evict
        self._free = list(range(num_blocks - 1, DUMMY_BLOCK, -1))
        self._users = [0] * num_blocks
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._keep: set[int] = set()

    @property
    def num_free(self) -> int:
        """Blocks that ``allocate`` can hand out, those that are merely cached included."""
        return len(self._free) + len(self._cached)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_used(self) -> int:
        return self.num_blocks - 1 - self.num_free

    def users(self, block: int) -> int:
        """How many hold the block."""
        return self._users[block]

    def allocate(self, count: int) -> list[int]:
        """``count`` blocks with one user each; their content is anything.

        Raises:
            ValueError: not that many are free (nothing is taken then), or a negative count.
        """
        if not 0 <= count <= self.num_free:
            raise ValueError(f"{count} blocks were asked for, {self.num_free} of {self.num_blocks - 1} are free")
        blocks = []
        for _ in range(count):
            block = self._free.pop() if self._free else self._evict()
            self._users[block] = 1
            blocks.append(block)
        return blocks

    def retain(self, block: int) -> None:
        """One more user of a used or cached block.

        Raises:
            ValueError: the block is free: its content is nobody's.
        """
        if self._users[block] == 0:
            if block not in self._cached:
                raise ValueError(f"block {block} is free, it cannot be shared")
            del self._cached[block]
        self._users[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """One user less of each, in this order (the first is given up first).

        Raises:
            ValueError: a block without users; those before it are released.
        """
        for block in blocks:
            if block == DUMMY_BLOCK or self._users[block] < 1:
                raise ValueError(f"block {block} was released more often than it was taken")
            self._users[block] -= 1
            if self._users[block] == 0:
                if block in self._keep:
                    self._cached[block] = None
                else:
                    self._free.append(block)

    def keep(self, block: int) -> None:
        """Marks a used block's content as worth keeping once it has no users."""
        if self._users[block] < 1:
            raise ValueError(f"block {block} has no user, it cannot enter the index")
        self._keep.add(block)

    @property
    def kept(self) -> set[int]:
        """Blocks whose content is worth keeping, used ones included."""
        return set(self._keep)

    def drop_cached(self) -> None:
        """Gives up everything that is cached."""
        while self._cached:
            self._free.append(self._evict())

    def check(self) -> None:
        """Raises RuntimeError if the books do not balance."""
        held = [block for block, users in enumerate(self._users) if users]
        free, cached = set(self._free), set(self._cached)
        if (
            len(free) != len(self._free)
            or free & cached
            or (free | cached) & set(held)
            or len(free) + len(cached) + len(held) != self.num_blocks - 1
            or DUMMY_BLOCK in free | cached | set(held)
            or not cached <= self._keep <= cached | set(held)
        ):
            raise RuntimeError(f"block pool out of balance: {len(free)} free, {len(cached)} cached, {len(held)} used")

    def _evict(self) -> int:
        block, _ = self._cached.popitem(last=False)
        self._keep.discard(block)
        if self.on_evict is not None:
            self.on_evict(block)
        return block
