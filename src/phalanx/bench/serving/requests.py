"""What is asked: bodies of requests, synthetic or from a file, the same for the same seed."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ENDPOINTS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
"""Name to path."""

_WORDS = (
    "the of and to in is was for on that by this with you it not or be are from at as your all have new more an we "
    "will can about if my has but our one other do no time they he up may what which their out use any there see only "
    "so his when here who also now help get first been would how were me some these its like than find"
)


@dataclass(frozen=True)
class Shape:
    """What every request shares.

    Attributes:
        model, endpoint: "completions" or "chat".
        output_len: tokens of an answer, drawn uniformly, where a dataset does not say.
        ignore_eos: whether answers go on to their full length; a field that not every server knows.
        extra: further fields of the body.
        seed: of everything that is drawn.
    """

    model: str
    endpoint: str
    output_len: range
    ignore_eos: bool = False
    extra: dict[str, Any] = field(default_factory=dict)
    seed: int = 0

    def body(self, asked: dict[str, Any], max_tokens: int) -> dict[str, Any]:
        """A streamed request whose last event counts the tokens."""
        body = {
            "model": self.model,
            **asked,
            "max_tokens": max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.extra,
        }
        return {**body, "ignore_eos": True} if self.ignore_eos else body

    def asked(self, prompt: str | list[int]) -> dict[str, Any]:
        """The fields that hold a prompt."""
        if self.endpoint == "chat":
            return {"messages": [{"role": "user", "content": prompt}]}
        return {"prompt": prompt}


@dataclass(frozen=True)
class Synthetic:
    """Random prompts of drawn lengths.

    Attributes:
        prompt_len: tokens of a prompt, drawn uniformly, its prefix not counted.
        vocab_size: token ids are drawn below it; None for prompts of common words, about one token each.
        prefix_len, prefix_groups: every prompt begins with one of so many prefixes of so many tokens.
    """

    prompt_len: range
    vocab_size: int | None
    prefix_len: int = 0
    prefix_groups: int = 1

    def requests(self, shape: Shape) -> Iterator[dict[str, Any]]:
        """Bodies without end."""
        chance = random.Random(shape.seed)
        prefixes = [self._tokens(self.prefix_len, chance) for _ in range(self.prefix_groups)]
        while True:
            tokens = [*chance.choice(prefixes), *self._tokens(chance.choice(self.prompt_len), chance)]
            prompt: Any = tokens if self.vocab_size is not None else " ".join(tokens)
            yield shape.body(shape.asked(prompt), chance.choice(shape.output_len))

    def _tokens(self, length: int, chance: random.Random) -> list[Any]:
        if self.vocab_size is None:
            return chance.choices(_WORDS.split(), k=length)
        return [chance.randrange(self.vocab_size) for _ in range(length)]


@dataclass(frozen=True)
class Dataset:
    """Requests from the lines of a file, again from its start when it ends.

    Attributes:
        rows: (the fields that hold the prompt, tokens of the answer or None).
    """

    rows: list[tuple[dict[str, Any], int | None]]

    def requests(self, shape: Shape) -> Iterator[dict[str, Any]]:
        """Bodies without end."""
        chance = random.Random(shape.seed)
        while True:
            for asked, max_tokens in self.rows:
                drawn = chance.choice(shape.output_len)
                yield shape.body(asked, drawn if max_tokens is None else max_tokens)


def read_dataset(path: Path, shape: Shape) -> Dataset:
    """A JSONL file: each line has ``prompt`` (text, or token ids for completions) or ``messages``, and may have
    ``max_tokens``.

    Raises:
        ValueError: a line that is not such an object, named by its number, or a file without one, or that is no text.
        OSError: the file cannot be read.
    """
    rows = []
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no text in UTF-8: {error}") from None
    # Not splitlines(), which also ends a line at characters that a JSON text may hold as they are.
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            rows.append(_row(json.loads(line), shape))
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from error
    if not rows:
        raise ValueError(f"{path} holds no request: a line is such as {json.dumps({'prompt': 'Hi', 'max_tokens': 8})}")
    return Dataset(rows)


def _row(found: Any, shape: Shape) -> tuple[dict[str, Any], int | None]:
    if not isinstance(found, dict) or ("prompt" in found) == ("messages" in found):
        raise ValueError("an object with either prompt or messages is expected")
    unknown = set(found) - {"prompt", "messages", "max_tokens"}
    if unknown:
        raise ValueError(f"unknown fields {sorted(unknown)}: prompt, messages and max_tokens are read")
    max_tokens = found.get("max_tokens")
    if max_tokens is not None and (type(max_tokens) is not int or max_tokens < 1):
        raise ValueError(f"max_tokens is {max_tokens!r}: a number of tokens from 1 is expected")
    if "messages" in found:
        if shape.endpoint != "chat" or not isinstance(found["messages"], list):
            raise ValueError("messages are a list, and for --endpoint chat")
        return {"messages": found["messages"]}, max_tokens
    prompt = found["prompt"]
    ids = isinstance(prompt, list) and all(type(token) is int for token in prompt)
    if not isinstance(prompt, str) and not (ids and shape.endpoint == "completions"):
        raise ValueError("a prompt is a text, or for --endpoint completions a list of token ids")
    return shape.asked(prompt), max_tokens
