"""From token ids to text as they come: no half characters, no part of a stop text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

REPLACEMENT = "\ufffd"


class Vocabulary:
    """A tokenizer of transformers as a stream of text needs it.

    Attributes:
        special_ids: what ``decode`` leaves out with ``skip_special_tokens``.
        byte_ids: tokens ``<0x..>`` for single bytes. A run of them is decoded as one, so that a later byte may change
            what the earlier ones are.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        added = getattr(tokenizer, "added_tokens_decoder", {})
        self.special_ids = frozenset(place for place, token in added.items() if token.special)
        names = [f"<0x{value:02X}>" for value in range(256)]
        found = tokenizer.convert_tokens_to_ids(names)
        self.byte_ids = frozenset(place for place in found if place is not None) - {tokenizer.unk_token_id}

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        """The tokenizer's own text of these ids, nothing tidied up."""
        return str(
            self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)
        )


class TextStream:
    """The text of one answer, token by token. ``take`` hands out what is certain; all that it hands out, joined, is the
    final text, and without stop texts that is the tokenizer's own decoding of all ids.

    Args:
        vocabulary: of the tokenizer.
        stop: texts that end the answer, earliest place first.
        include_stop: whether the stop text belongs to the answer.
        skip_special_tokens: as in ``decode``.
        min_tokens: a stop text does not count unless it is completed after this many tokens.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        skip_special_tokens: bool = True,
        min_tokens: int = 0,
    ) -> None:
        self._vocabulary = vocabulary
        self._stop = tuple(stop)
        self._include_stop = include_stop
        self._skip = skip_special_tokens
        self._min_tokens = min_tokens
        self._ids: list[int] = []
        self._num_tokens = 0
        # Decoding looks back to `_window`: what a token adds may depend on the tokens before it (spaces, bytes).
        self._window = self._read = 0
        # Stop texts are looked for from `_search_from`, and must end behind `_floor`.
        self._search_from = self._floor = 0
        self._taken = 0
        self.text = ""
        self.stopped: str | None = None
        self._closed = False

    def push(self, token: int) -> str | None:
        """Adds a token; returns the stop text that it completes, if any."""
        self._num_tokens += 1
        if self._skip and token in self._vocabulary.special_ids:
            return None
        self._ids.append(token)
        # Without stop texts nobody needs the text before it is taken.
        return self._advance() if self._stop else None

    def close(self) -> None:
        """No more tokens: what was held back belongs to the text."""
        if self._closed:
            return
        self._closed = True
        if self.stopped is None:
            before = self._decode(self._ids[self._window : self._read])
            self._add(self._decode(self._ids[self._window :])[len(before) :])

    def take(self) -> str:
        """What is certain and was not taken before."""
        if not (self._closed or self._stop):
            self._advance()
        end = len(self.text) if self._closed or self.stopped is not None else len(self.text) - self._held()
        piece, self._taken = self.text[self._taken : end], max(end, self._taken)
        return piece

    def _advance(self) -> str | None:
        if not self._ids:
            return None
        before = self._decode(self._ids[self._window : self._read])
        now = self._decode(self._ids[self._window :])
        if now.endswith(REPLACEMENT) or len(now) <= len(before):
            # Bytes of a character that is not whole yet, or tokens without text.
            return None
        if self._ids[-1] in self._vocabulary.byte_ids and self._find(self.text + now[len(before) :]) is None:
            # A later byte may change what this one is; unless the answer ends here.
            return None
        self._window, self._read = self._read, len(self._ids)
        return self._add(now[len(before) :])

    def _add(self, piece: str) -> str | None:
        self.text += piece
        if self._num_tokens <= self._min_tokens:
            self._floor = len(self.text)
            return None
        found = self._find(self.text)
        if found is None:
            longest = max(map(len, self._stop), default=0)
            self._search_from = max(self._search_from, len(self.text) - longest + 1)
            return None
        place, stop = found
        self.text = self.text[: place + len(stop) * self._include_stop]
        self.stopped = stop
        return stop

    def _find(self, text: str) -> tuple[int, str] | None:
        """The first place of a stop text that counts, and which it is."""
        if self._num_tokens <= self._min_tokens:
            return None
        starts = [(max(self._search_from, self._floor - len(stop) + 1, 0), stop) for stop in self._stop]
        places = [(place, stop) for start, stop in starts if (place := text.find(stop, start)) >= 0]
        return min(places, key=lambda found: found[0], default=None)

    def _held(self) -> int:
        """Characters at the end that may be the beginning of a stop text."""
        longest = 0
        for stop in self._stop:
            for length in range(min(len(stop) - 1, len(self.text)), longest, -1):
                if self.text.endswith(stop[:length]):
                    longest = length
                    break
        return longest

    def _decode(self, ids: Sequence[int]) -> str:
        return self._vocabulary.decode(ids, self._skip)
