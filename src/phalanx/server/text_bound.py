"""TextBound: whether a text is too long for a context, told by its length alone."""

from __future__ import annotations

import json
from typing import Any

_COMPOSED = 4
"""The most characters that Unicode's composing normal forms make one of."""


class TextBound:
    """Tokenising takes seconds for millions of characters; that they are too many can be said before.

    There is no bound where a token may stand for any number of characters: some are dropped, or unknown ones become one
    token. White space counts only where no token takes what is beside it.

    Args:
        tokenizer: of transformers, or None.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._longest = _longest(tokenizer)
        added = getattr(tokenizer, "added_tokens_decoder", {}).values()
        self._strips = any(token.lstrip or token.rstrip for token in added)

    def exceeded(self, text: str, tokens: int) -> bool:
        """Whether a text is surely more than this many tokens."""
        if self._longest is None or len(text) <= tokens * self._longest:
            return False
        return not self._strips or sum(map(len, text.split())) > tokens * self._longest


def _longest(tokenizer: Any) -> int | None:
    """The most characters that a token stands for. A token's own name is never shorter than they are."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    splits, changes = _steps(backend.pre_tokenizer, "pretokenizers"), _steps(backend.normalizer, "normalizers")
    by_bytes = getattr(backend.model, "byte_fallback", False) or any(step["type"] == "ByteLevel" for step in splits)
    if not by_bytes or not all(map(_keeps, splits + changes)):
        return None
    composed = _COMPOSED if any(step["type"] in ("NFC", "NFKC") for step in changes) else 1
    return composed * max(map(len, tokenizer.get_vocab()), default=1)


def _steps(component: Any, parts: str) -> list[dict[str, Any]]:
    if component is None:
        return []
    step = json.loads(component.__getstate__())
    found: list[dict[str, Any]] = step[parts] if step["type"] == "Sequence" else [step]
    return found


def _keeps(step: dict[str, Any]) -> bool:
    """Whether a step leaves every character in the text, but for composing some."""
    kind = step["type"]
    if kind in ("Split", "Punctuation"):
        return bool(step["behavior"] != "Removed")
    if kind == "Replace":
        return len(step["content"]) >= len(step["pattern"].get("String", step["content"] + " "))
    return kind in ("ByteLevel", "Digits", "Metaspace", "Prepend", "NFC", "NFKC", "NFD", "NFKD")
