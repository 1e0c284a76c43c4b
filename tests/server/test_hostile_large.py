"""Large bodies: a fault is told once and soon, however often it is there."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from phalanx.server.bodies import read_body
from phalanx.server.errors import ApiError
from phalanx.server.routes_models import DetokenizeRequest, TokenizeRequest
from phalanx.server.schema_chat import ChatRequest
from phalanx.server.schema_completions import CompletionRequest
from phalanx.server.schema_embeddings import EmbeddingRequest
from phalanx.server.schema_responses import ResponsesRequest
from tests.server.running import NAME, Server

pytestmark = pytest.mark.xdist_group("server")
MANY = 2000


class Sent:
    """A request with this body."""

    headers: dict[str, str] = {}  # noqa: RUF012

    def __init__(self, data: bytes) -> None:
        self.data = data

    async def body(self) -> bytes:
        return self.data


def read(data: bytes) -> CompletionRequest:
    return asyncio.run(read_body(Sent(data), CompletionRequest))  # type: ignore[arg-type]


def lists(schema: type[BaseModel], body: dict[str, Any]) -> list[tuple[type[BaseModel], dict[str, Any]]]:
    """Bodies with a long list of nulls in each place that a body has a list or may have one."""
    return [(schema, {**body, name: [None] * MANY}) for name in schema.model_fields]


PART = {"type": "input_text", "text": "x", "annotations": [None] * MANY, "logprobs": [None] * MANY}
NESTED: list[tuple[type[BaseModel], dict[str, Any]]] = [
    (CompletionRequest, {"model": NAME, "prompt": [[None] * MANY]}),
    (CompletionRequest, {"model": NAME, "prompt": [5] * MANY + ["x"]}),
    (CompletionRequest, {"model": NAME, "prompt": "x", "structured_outputs": {"choice": [None] * MANY}}),
    (ChatRequest, {"model": NAME, "messages": [{"role": "user", "content": [None] * MANY}]}),
    (ChatRequest, {"model": NAME, "messages": [{"role": "assistant", "tool_calls": [None] * MANY}]}),
    (ResponsesRequest, {"model": NAME, "input": [{"role": "user", "content": [PART]}]}),
    (
        ResponsesRequest,
        {"model": NAME, "input": [{"type": "reasoning", "content": [None] * MANY, "summary": [1] * MANY}]},
    ),
    (ResponsesRequest, {"model": NAME, "input": [{"type": "function_call_output", "output": [None] * MANY}]}),
]


@pytest.mark.parametrize(
    ("schema", "body"),
    [
        *lists(CompletionRequest, {"model": NAME, "prompt": "x"}),
        *lists(ChatRequest, {"model": NAME, "messages": [{"role": "user", "content": "x"}]}),
        *lists(ResponsesRequest, {"model": NAME, "input": "x"}),
        *lists(EmbeddingRequest, {"model": NAME, "input": "x"}),
        *lists(TokenizeRequest, {}),
        *lists(DetokenizeRequest, {}),
        *NESTED,
    ],
)
def test_a_list_of_faults_is_left_at_the_first(schema: type[BaseModel], body: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as raised:
        schema.model_validate_json(json.dumps(body), strict=True)
    assert raised.value.error_count() <= 8


@pytest.mark.parametrize("part", [b'{"x":1}', b"[]", b'"\\\\":1'])
def test_a_body_of_countless_parts_is_refused(part: bytes) -> None:
    parts = b",".join([part] * 100_001)
    with pytest.raises(ApiError, match="100000"):
        read(b'{"model":"tiny","x":' + (b"{%s}" if part[:1] == b'"' else b"[%s]") % parts + b"}")


def test_a_text_may_hold_what_looks_like_parts() -> None:
    text = '{"a": [1], "b": "\\"": []} ' * 100_000
    assert read(json.dumps({"model": NAME, "prompt": text}).encode()).prompt == text


def test_what_was_given_is_told_in_short(server: Server) -> None:
    answer = server.complete(prompt=[None] * 500_000)
    assert answer.status_code == 400 and len(answer.json()["error"]["message"]) < 1000
    answer = server.complete(prompt=[5] * 500_000)
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    answer = server.http.post("/detokenize", json={"tokens": [5] * 5000})
    assert answer.status_code == 200 and len(answer.json()["prompt"]) >= 5000


def test_a_null_is_an_absent_field(server: Server) -> None:
    fields = dict.fromkeys(("suffix", "functions", "audio", "none-such", "temperature", "stop"))
    assert server.complete(prompt="hello", max_tokens=1, **fields).status_code == 200
    wrong = server.complete(prompt="hello", max_tokens=1, **fields, other=1)
    assert wrong.status_code == 400 and wrong.json()["error"]["param"] == "other"


def test_messages_without_content(server: Server) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    assert server.chat(messages=turns, max_tokens=1).status_code == 200
    texts = []
    for content in ("", None):
        messages = [turns[0], {"role": "assistant", "content": content}]
        texts.append(server.http.post("/tokenize", json={"messages": messages}).json()["tokens"])
    assert texts[0] == texts[1]
    refused = server.chat(messages=[{"role": "user", "content": None}])
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "messages.0"
