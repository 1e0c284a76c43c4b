"""Hostile requests get a 4xx in OpenAI's shape, and the engine lives."""

from __future__ import annotations

import socket
from typing import Any

import httpx2 as httpx
import pytest

from tests.server.hostile_bodies import RAW, mutated
from tests.server.running import NAME, Server

pytestmark = pytest.mark.xdist_group("server")


def check(answer: httpx.Response, what: Any) -> None:
    assert answer.status_code == 200 or 400 <= answer.status_code < 500, (answer.status_code, answer.text, what)
    if answer.status_code != 200:
        error = answer.json()["error"]
        assert set(error) == {"message", "type", "param", "code"} and error["message"], what
        assert "Traceback" not in answer.text and "site-packages" not in answer.text and "/src/" not in answer.text


def tool(parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": parameters}}


@pytest.mark.parametrize("count", [300, pytest.param(5000, marks=pytest.mark.slow)])
def test_mutated_bodies(server: Server, count: int) -> None:
    pid, statuses = server.engine_pid, []
    for path, body in mutated(count, seed=count):
        answer = server.http.post(path, content=body, headers={"Content-Type": "application/json"})
        check(answer, body)
        statuses.append(answer.status_code)
    assert statuses.count(400) > count // 2
    assert server.complete(prompt="hello", max_tokens=1).status_code == 200 and server.engine_pid == pid
    server.wait_idle()


@pytest.mark.parametrize("place", range(len(RAW)))
def test_raw_bodies(server: Server, place: int) -> None:
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize"):
        answer = server.http.post(path, content=RAW[place], headers={"Content-Type": "application/json"})
        assert answer.status_code == 400, answer.text
        check(answer, place)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": "x", "unknown": 1}, "unknown"),
        ({"prompt": "x", "suffix": "y"}, "suffix"),
        ({"prompt": "x", "best_of": 2}, None),
        ({"prompt": "x", "max_tokens": "5"}, "max_tokens"),
        ({"prompt": "x", "max_tokens": True}, "max_tokens"),
        ({"prompt": "x", "max_tokens": 0}, None),
        ({"prompt": "x", "temperature": 101}, "temperature"),
        ({"prompt": "x", "stop": ["a"] * 33}, "stop"),
        ({"prompt": "x", "stop": ""}, "stop"),
        ({"prompt": "x", "stream_options": {"include_usage": True}}, None),
        ({"prompt": "x", "stream": True, "stream_options": {"other": True}}, "stream_options.other"),
        ({"prompt": "x", "logit_bias": {"a": 1}}, "logit_bias.a"),
        ({"prompt": "x", "logit_bias": {"263": 1}}, None),
        ({"prompt": "x", "n": 2, "temperature": 0}, None),
        ({"prompt": [300]}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": ["x"] * 65}, "prompt"),
        ({"prompt": "x" * 5000}, "prompt"),
        ({"prompt": "x", "max_tokens": 5000}, "prompt"),
        ({"prompt": [5] * 4097}, "prompt"),
        ({"prompt": "x", "logit_bias": {"05": 1}}, "logit_bias.05"),
        ({"prompt": "x", "repetition_penalty": 1e-300}, "repetition_penalty"),
        ({}, "prompt"),
    ],
)
def test_refused_fields_are_named(server: Server, fields: dict[str, Any], param: str | None) -> None:
    answer = server.complete(**fields)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param, error
    if param is None:
        assert any(name in error["message"] for name in [*fields, "4096", "logit_bias", "include_usage"]), error


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "image_url"),
        ({"messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}]}, "input_audio"),
        ({"messages": []}, "messages"),
        ({"functions": []}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"top_logprobs": 2}, "logprobs=true"),
        ({"max_tokens": 1, "max_completion_tokens": 1}, "max_completion_tokens"),
        ({"chat_template": "x"}, "--trust-request-chat-template"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "none"}}}}, "schema"),
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs"),
        ({"reasoning_effort": "high"}, "chat_template_kwargs"),
        ({"tools": [tool({"type": "array"})]}, "tools.0.function.parameters"),
        ({"tools": [tool({}), tool("x")]}, "tools.1.function.parameters"),
    ],
)
def test_refused_fields_of_chat_are_named(server: Server, fields: dict[str, Any], named: str) -> None:
    answer = server.chat(**{"messages": [{"role": "user", "content": "hi"}], **fields})
    assert answer.status_code == 400 and named in answer.json()["error"]["message"], answer.text


def test_paths_and_methods(server: Server) -> None:
    for method, path, status in (("GET", "/v1/completions", 405), ("POST", "/none", 404), ("DELETE", "/health", 405)):
        answer = server.http.request(method, path)
        assert answer.status_code == status
        check(answer, path)
    assert "POST" in server.http.get("/v1/completions").headers["Allow"]
    wrong = server.http.post("/v1/completions", content=b"{}", headers={"Content-Type": "text/plain"})
    assert wrong.status_code == 400 and "text/plain" in wrong.json()["error"]["message"]


def test_what_is_no_http_is_no_harm(server: Server) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    for data in (
        b"\x00\x01\x02\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nContent-Length: x\r\n\r\n",
    ):
        with socket.create_connection((host, int(port)), timeout=5) as connection:
            connection.sendall(data)
            connection.recv(1000)
    assert server.complete(prompt="hello", max_tokens=1).status_code == 200


def test_tokenize_and_detokenize(server: Server) -> None:
    found = server.http.post("/tokenize", json={"prompt": "hello ü", "return_token_strs": True}).json()
    assert found["count"] == len(found["tokens"]) == 5 and found["max_model_len"] == 4096
    assert found["token_strs"] == ["hell", "o", " ", "bytes:\\xc3", "bytes:\\xbc"]
    assert server.http.post("/detokenize", json={"tokens": found["tokens"]}).json() == {"prompt": "hello ü"}
    messages = [{"role": "user", "content": "hi"}]
    chat = server.http.post("/tokenize", json={"messages": messages, "model": NAME}).json()
    assert chat["count"] == server.chat(messages=messages, max_tokens=1).json()["usage"]["prompt_tokens"]
