"""TokenTexts: single tokens as texts and bytes, and log-probabilities in OpenAI's two shapes."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterable
from typing import Any

from transformers.convert_slow_tokenizer import bytes_to_unicode

REPLACEMENT = "\ufffd"
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
Entry = dict[int, float | None]
"""Log-probabilities by token id, the token's own first."""


class TokenTexts:
    """What each token of a tokenizer stands for.

    Args:
        tokenizer: of transformers.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, bytes] = {}
        self._byte_of = _byte_alphabet(tokenizer)
        self._added = {place: str(token) for place, token in getattr(tokenizer, "added_tokens_decoder", {}).items()}

    def utf8(self, token: int) -> bytes:
        """The UTF-8 bytes of a token, which need not be whole characters."""
        if token not in self._known:
            self._known[token] = self._bytes(token)
        return self._known[token]

    def text(self, token: int) -> str:
        """A token as text; what is no whole character becomes U+FFFD."""
        return self.utf8(token).decode(errors="replace")

    def escaped(self, token: int) -> str:
        """A token as text; where it is no whole character, as "bytes:\\xe2\\x82"."""
        text = self.text(token)
        if REPLACEMENT not in text:
            return text
        return "bytes:" + "".join(f"\\x{value:02x}" for value in self.utf8(token))

    def _bytes(self, token: int) -> bytes:
        if token in self._added:
            return self._added[token].encode()
        name = self._tokenizer.convert_ids_to_tokens(token)
        if name is None:
            return b""
        if self._byte_of is not None and all(letter in self._byte_of for letter in name):
            return bytes(self._byte_of[letter] for letter in name)
        byte = _BYTE.fullmatch(name)
        if byte is not None:
            return bytes([int(byte[1], 16)])
        return str(name).replace("\u2581", " ").encode(errors="replace")

    # -- shapes

    def chat_entries(self, entries: Iterable[Entry], top: int) -> list[dict[str, Any]]:
        """Log-probabilities as chat completions give them, with the ``top`` likeliest."""
        found = []
        for entry in entries:
            chosen, value = next(iter(entry.items()))
            likeliest = [self._chat_entry(token, other) for token, other in _likeliest(entry, top)]
            found.append({**self._chat_entry(chosen, value), "top_logprobs": likeliest})
        return found

    def _chat_entry(self, token: int, value: float | None) -> dict[str, Any]:
        return {"token": self.text(token), "logprob": value, "bytes": list(self.utf8(token))}


class CompletionLogprobs:
    """Log-probabilities of one answer as completions give them, in pieces: offsets count on.

    Args:
        top: how many of the likeliest tokens are listed.
    """

    def __init__(self, texts: TokenTexts, top: int) -> None:
        self._texts = texts
        self._top = top
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._offset = 0

    def prompt(self, token_ids: list[int], entries: list[Entry | None]) -> dict[str, Any]:
        """Of an echoed prompt; the first token has none."""
        return self._shape([(token, entry) for token, entry in zip(token_ids, entries, strict=True)])

    def piece(self, entries: list[Entry]) -> dict[str, Any]:
        """Of tokens that were drawn."""
        return self._shape([(next(iter(entry)), entry) for entry in entries])

    def _shape(self, tokens: list[tuple[int, Entry | None]]) -> dict[str, Any]:
        shape: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token, entry in tokens:
            shape["tokens"].append(self._texts.escaped(token))
            shape["text_offset"].append(self._offset)
            self._offset += len(self._decoder.decode(self._texts.utf8(token)))
            shape["token_logprobs"].append(None if entry is None else entry[token])
            shape["top_logprobs"].append(None if entry is None else self._listed(token, entry))
        return shape

    def _listed(self, token: int, entry: Entry) -> dict[str, float | None]:
        listed: dict[str, float | None] = {}
        for other, value in [*_likeliest(entry, self._top), (token, entry[token])]:
            listed.setdefault(self._texts.escaped(other), value)
        return listed


def joined(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """The log-probabilities of a text and of what follows it."""
    return {name: first[name] + second[name] for name in first}


def _likeliest(entry: Entry, top: int) -> list[tuple[int, float | None]]:
    """The ``top`` likeliest of an entry, which holds them and the token's own."""
    ranked = sorted(entry.items(), key=lambda item: float("-inf") if item[1] is None else item[1], reverse=True)
    return ranked[:top]


def _byte_alphabet(tokenizer: Any) -> dict[str, int] | None:
    """The byte that each letter of a byte-level vocabulary stands for; None for another kind of vocabulary."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    decoder = json.loads(backend.to_str()).get("decoder") or {}
    kinds = {decoder.get("type"), *(part.get("type") for part in decoder.get("decoders", ()))}
    return {letter: value for value, letter in bytes_to_unicode().items()} if "ByteLevel" in kinds else None
