"""Router: which of several engines gets a prompt. The one where it costs the least work, as far as can be told.

The work of a prompt on an engine is its tokens that the engine has not seen lately, and what waits there already: an
answer in work counts as so many tokens, and an engine that is nearly out of KV blocks as if more of them waited. So
prompts with a common beginning stay together until that engine is so busy that the beginning is better computed anew.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Mapping, Sequence

_ANSWER_TOKENS = 64
"""What an answer in work weighs, in tokens of a prompt."""
_FULL_FROM = 0.9
_FULL_TOKENS = 4096
"""What an engine without a free KV block weighs, in tokens of a prompt; nothing below this share of blocks in use."""
_REMEMBERED = 100_000


class Router:
    """Remembers, of the latest prompts, which engines have seen which beginnings.

    Args:
        chunk: tokens that are remembered together: those of a KV block.
        remembered: chunks that are remembered at most; about 200 bytes each.
    """

    def __init__(self, chunk: int, remembered: int = _REMEMBERED) -> None:
        self._chunk = chunk
        self._remembered = remembered
        # The hash of a beginning that ends with a chunk -> the engines that have seen it, a bit each. Latest last.
        self._seen: OrderedDict[int, int] = OrderedDict()
        self._turn = 0

    def __len__(self) -> int:
        return len(self._seen)

    def pick(self, token_ids: Sequence[int], salt: str, loads: Mapping[int, tuple[int, float]]) -> int:
        """The engine for a prompt, which is taken to have seen it from now on.

        Args:
            salt: prompts of different salts share nothing.
            loads: for every engine that can take it, its answers that run or wait, and the share of its KV blocks in
                use.

        Raises:
            ValueError: no engine can.
        """
        if not loads:
            raise ValueError("there is no engine to pick")
        keys = self._keys(token_ids, salt)
        shared = self._shared(keys)
        self._turn += 1

        def cost(engine: int) -> tuple[float, int]:
            answers, kv_usage = loads[engine]
            fullness = max(0.0, kv_usage - _FULL_FROM) / (1 - _FULL_FROM)
            new = len(token_ids) - shared.get(engine, 0) * self._chunk
            # Where all is equal, they take turns.
            return new + _ANSWER_TOKENS * answers + _FULL_TOKENS * fullness, (engine - self._turn) % len(loads)

        picked = min(loads, key=cost)
        for key in keys:
            self._seen[key] = self._seen.pop(key, 0) | 1 << picked
        while len(self._seen) > self._remembered:
            self._seen.popitem(last=False)
        return picked

    def forget(self, engine: int) -> None:
        """An engine has lost what it has seen."""
        for key, engines in list(self._seen.items()):
            if engines & ~(1 << engine):
                self._seen[key] = engines & ~(1 << engine)
            else:
                del self._seen[key]

    def _keys(self, token_ids: Sequence[int], salt: str) -> list[int]:
        data = array("q", token_ids).tobytes()
        size = self._chunk * 8
        keys, key = [], hash(salt)
        for start in range(0, len(data) - size + 1, size):
            key = hash((key, data[start : start + size]))
            keys.append(key)
        # What is more than can be remembered would push out its own beginning.
        return keys[: self._remembered]

    def _shared(self, keys: Sequence[int]) -> dict[int, int]:
        """How many leading chunks each engine has seen; those that have seen none are left out."""
        shared: dict[int, int] = {}
        left = -1
        for count, key in enumerate(keys, start=1):
            left &= self._seen.get(key, 0)
            if not left:
                break
            shared |= {engine: count for engine in range(left.bit_length()) if left >> engine & 1}
        return shared
