"""Bodies that nobody should send: valid ones, mutated by a seeded hand."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from typing import Any

from tests.server.running import NAME

VALID: list[tuple[str, dict[str, Any]]] = [
    (
        "/v1/completions",
        {"model": NAME, "prompt": "hello", "max_tokens": 2, "stop": ["a"], "logit_bias": {"5": 1}},
    ),
    ("/v1/completions", {"model": NAME, "prompt": [[5, 6], [7]], "max_tokens": 1, "n": 1, "logprobs": 1, "echo": True}),
    (
        "/v1/chat/completions",
        {
            "model": NAME,
            "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
            "max_tokens": 2,
            "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}},
            "stream_options": {"include_usage": True},
            "stream": True,
            "chat_template_kwargs": {"a": 1},
        },
    ),
    (
        "/v1/chat/completions",
        {
            "model": NAME,
            "messages": [
                {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{}"}}]},
            ],
            "max_tokens": 1,
            "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
            "tool_choice": "auto",
        },
    ),
    (
        "/v1/responses",
        {
            "model": NAME,
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
                {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
            ],
            "instructions": "be brief",
            "max_output_tokens": 2,
            "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}}],
            "text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "object"}}},
            "metadata": {"a": "b"},
            "stream": True,
        },
    ),
    ("/v1/embeddings", {"model": NAME, "input": ["hello", "x"], "dimensions": 4, "truncate": True, "pooling": "mean"}),
    ("/v1/embeddings", {"model": NAME, "input": [[5, 6], [7]], "encoding_format": "base64"}),
    ("/tokenize", {"prompt": "hello"}),
    ("/detokenize", {"tokens": [5, 6]}),
]
NASTY: list[Any] = [
    *(None, True, False, 0, -1, 1, 2**31, 2**63, -(2**64), 10**400, 1.5, -0.0, 1e308, 5e-324, "", "5", "x" * 5000),
    *("\x00", "\ud800", "😀", "{{ x }}", [], [[]], [None], [[[]]], {}, {"": None}, {"a": {"b": []}}, ["a", 1], [1.5]),
]
RAW = [
    b"",
    b"null",
    b"[]",
    b"5",
    b'"x"',
    b"{",
    b"\xff\xfe",
    b"\xef\xbb\xbf{}",
    b'{"model":"tiny","prompt":"\\ud800"}',
    b'{"model":"tiny","prompt":"\\udc00\\ud800"}',
    b'{"model":"tiny","prompt":"\xed\xa0\x80"}',
    b'{"model":"tiny","prompt":"x","temperature":NaN}',
    b'{"model":"tiny","prompt":"x","temperature":Infinity}',
    b'{"model":"tiny","prompt":"x","temperature":1e999}',
    b'{"model":"tiny","prompt":"x","seed":' + b"9" * 5000 + b"}",
    b'{"model":"tiny","prompt":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    b'{"model":"tiny","messages":[],"response_format":' + b'{"a":' * 50_000 + b"1" + b"}" * 50_000 + b"}",
    b'{"model":"tiny","prompt":"x","prompt":5}',
    b'{"model":"tiny","prompt":"x"} trailing',
]
RAW = [
    *RAW,
    b'{"model":"tiny","prompt":"x","response_format":{"type":"json_schema","json_schema":{"schema":'
    + b'{"properties":{"a":' * 90
    + b"{}"
    + b"}}" * 90
    + b"}}}",
]


def mutated(count: int, seed: int) -> Iterator[tuple[str, bytes]]:
    """(path, body) of so many requests."""
    dice = random.Random(seed)
    for number in range(count):
        path, valid = dice.choice(VALID)
        body = copy.deepcopy(valid)
        for _ in range(dice.randint(1, 2)):
            _mutate(body, dice)
        if number % 10 == 0:
            # Half of a valid body, or with a byte of it changed.
            data = bytearray(json.dumps(valid).encode())
            data[dice.randrange(len(data))] = dice.randrange(256)
            yield path, bytes(data[: dice.randint(1, len(data))])
        else:
            yield path, json.dumps(body).encode()


def _mutate(body: dict[str, Any], dice: random.Random) -> None:
    places = list(_places(body)) or [(body, "model")]
    holder, key = dice.choice(places)
    kind = dice.random()
    if kind < 0.7:
        holder[key] = copy.deepcopy(dice.choice(NASTY))
    elif kind < 0.85 and isinstance(holder, dict):
        holder[dice.choice(["unknown", "modalities", "", "suffix", "best_of", "cache_salt"])] = dice.choice(NASTY)
    elif isinstance(holder, dict):
        holder.pop(key, None)
    else:
        holder.append(copy.deepcopy(dice.choice(NASTY)))


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield value, key
        yield from _places(item)
