"""PrefixCache: full blocks found again by their content.

A block is named by a chained 128-bit key over everything that its KV depends on: model, adapter, salt, KV group, all
tokens before it, its own tokens, and their rope regimes. Keys only find candidates: a hit compares the tokens and the
chain itself, so that equal keys of different content are harmless.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass


def hash_block(parent: bytes, content: bytes) -> bytes:
    """The 128-bit key of a block with this content behind a block (or root) with the key ``parent``."""
    return hashlib.blake2b(parent + content, digest_size=16).digest()


@dataclass(frozen=True, eq=False)
class Entry:
    """A block in the index: what it holds, and the entry that it continues (None at the root named ``root``)."""

    block: int
    key: bytes
    content: bytes
    parent: Entry | None
    root: str


class PrefixCache:
    """An index of full blocks. Which of them are alive is the pool's business; it tells of evictions by ``remove``."""

    def __init__(self) -> None:
        self._by_key: dict[bytes, list[Entry]] = {}
        self._by_block: dict[int, Entry] = {}

    def __len__(self) -> int:
        return len(self._by_block)

    def find(self, root: str, parent: Entry | None, tokens: Sequence[int], regimes: Sequence[int] = ()) -> Entry | None:
        """The entry that continues ``parent`` by ``tokens``, or None."""
        content = _content(tokens, regimes)
        for entry in self._by_key.get(self._key(root, parent, content), ()):
            if entry.content == content and entry.parent is parent and entry.root == root:
                return entry
        return None

    def insert(
        self, root: str, parent: Entry | None, tokens: Sequence[int], block: int, regimes: Sequence[int] = ()
    ) -> Entry:
        """Enters a block; where the same content is there already, that entry is returned and nothing entered.

        Raises:
            ValueError: the block is in the index with other content.
        """
        known = self.find(root, parent, tokens, regimes)
        if known is not None:
            return known
        if block in self._by_block:
            raise ValueError(f"block {block} is in the index already, with other content")
        content = _content(tokens, regimes)
        entry = Entry(block, self._key(root, parent, content), content, parent, root)
        self._by_key.setdefault(entry.key, []).append(entry)
        self._by_block[block] = entry
        return entry

    def remove(self, block: int) -> None:
        """Forgets a block whose content is given up; entries behind it are found no more until they go too."""
        entry = self._by_block.pop(block, None)
        if entry is None:
            return
        siblings = self._by_key[entry.key]
        siblings.remove(entry)
        if not siblings:
            del self._by_key[entry.key]

    def entry_of(self, block: int) -> Entry | None:
        """The entry of a block, None if it is not in the index."""
        return self._by_block.get(block)

    def blocks(self) -> set[int]:
        """All blocks in the index."""
        return set(self._by_block)

    def check(self) -> None:
        """Raises RuntimeError if a block's key and the index disagree."""
        listed = [entry for entries in self._by_key.values() for entry in entries]
        if len(listed) != len(self._by_block) or any(self._by_block.get(e.block) is not e for e in listed):
            raise RuntimeError("prefix index out of balance: blocks and keys do not name the same entries")
        for entry in listed:
            if entry.key != self._key(entry.root, entry.parent, entry.content):
                raise RuntimeError(f"prefix index out of balance: block {entry.block} has the key of other content")

    def _key(self, root: str, parent: Entry | None, content: bytes) -> bytes:
        return hash_block(parent.key if parent is not None else root.encode(), content)


def _content(tokens: Sequence[int], regimes: Sequence[int]) -> bytes:
    return array("q", tokens).tobytes() + (b"|" + array("q", regimes).tobytes() if regimes else b"")
