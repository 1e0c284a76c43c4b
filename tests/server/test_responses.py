"""/v1/responses through the official client."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from phalanx.server.response_output import ResponseOutput
from phalanx.server.schema_responses import ResponsesRequest
from tests.server.running import NAME, Server

pytestmark = pytest.mark.xdist_group("server")
WEATHER: Any = {
    "type": "function",
    "name": "weather",
    "parameters": {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": True,
}


def test_a_response_is_the_chat_answer(client: openai.OpenAI) -> None:
    chat = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    expected = client.chat.completions.create(model=NAME, messages=chat, max_tokens=9, temperature=0)
    asked: Any = {"model": NAME, "instructions": "be brief", "max_output_tokens": 9, "temperature": 0}
    inputs: list[Any] = ["hi", [{"role": "user", "content": [{"type": "input_text", "text": "hi"}]}]]
    for given in inputs:
        answer = client.responses.create(input=given, metadata={"a": "b"}, store=False, **asked)
        assert answer.output_text == expected.choices[0].message.content
        assert answer.usage.input_tokens == expected.usage.prompt_tokens
        assert answer.usage.output_tokens == expected.usage.completion_tokens
        assert (answer.object, answer.model, answer.metadata) == ("response", NAME, {"a": "b"})
    cut = expected.choices[0].finish_reason == "length"
    assert answer.status == ("incomplete" if cut else "completed")
    assert (answer.incomplete_details.reason == "max_output_tokens") if cut else answer.incomplete_details is None


@pytest.mark.parametrize("tokens", [3, 4000])
def test_the_events_build_the_response(client: openai.OpenAI, tokens: int) -> None:
    asked: Any = {"model": NAME, "input": "hi", "max_output_tokens": tokens, "temperature": 0}
    if tokens > 3:
        asked["text"] = {"format": {"type": "json_schema", "name": "x", "schema": {"enum": ["one", "two"]}}}
    whole = client.responses.create(**asked)
    events = list(client.responses.create(stream=True, **asked))
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    kinds = [event.type for event in events if event.type != "response.output_text.delta"]
    end = "response.completed" if tokens > 3 else "response.incomplete"
    assert kinds == [
        *("response.created", "response.in_progress", "response.output_item.added", "response.content_part.added"),
        *("response.output_text.done", "response.content_part.done", "response.output_item.done", end),
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(deltas) == whole.output_text == events[-1].response.output_text
    assert events[-1].response.usage.total_tokens == whole.usage.total_tokens
    assert events[0].response.status == "in_progress" and events[0].response.output == []
    assert [item.status for item in whole.output] == ["completed" if tokens > 3 else "incomplete"]
    if tokens > 3:
        assert json.loads(whole.output_text) in ("one", "two") and whole.text.format.type == "json_schema"
    with client.responses.stream(**asked) as stream:
        for _ in stream:
            pass
        if tokens > 3:
            assert stream.get_final_response().output_text == whole.output_text


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "weather"}])
def test_functions_are_called(client: openai.OpenAI, choice: Any) -> None:
    asked: Any = {"model": NAME, "input": [{"role": "user", "content": "hi"}], "tools": [WEATHER]}
    asked |= {"tool_choice": choice, "parallel_tool_calls": False, "max_output_tokens": 150, "extra_body": {"seed": 1}}
    answer = client.responses.create(**asked)
    (call,) = answer.output
    assert (call.type, call.name, call.status) == ("function_call", "weather", "completed")
    assert json.loads(call.arguments)["city"] in ("Paris", "Rome")
    events = list(client.responses.create(stream=True, **asked))
    deltas = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    (done,) = [event for event in events if event.type == "response.function_call_arguments.done"]
    assert "".join(deltas) == done.arguments == call.arguments == events[-1].response.output[0].arguments
    # The answer's own items, and what the function gave, are the next input. This template knows no role "tool".
    turns = [*asked["input"], *answer.output]
    again = client.responses.create(model=NAME, input=turns, max_output_tokens=3)
    assert again.usage.input_tokens > answer.usage.input_tokens
    turns.append({"type": "function_call_output", "call_id": call.call_id, "output": "sunny"})
    with pytest.raises(openai.BadRequestError, match="unknown role tool") as caught:
        client.responses.create(model=NAME, input=turns, max_output_tokens=3)
    assert caught.value.param == "input"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "c"}, "conversation"),
        ({"store": True}, "store"),
        ({"background": True}, "background"),
        ({"reasoning": {"effort": "low"}}, "reasoning"),
        ({"include": ["message.output_text.logprobs"]}, "include"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tools": [WEATHER]}, None),
        ({"truncation": "auto"}, "truncation"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"tool_choice": "required"}, None),
        ({"service_tier": "flex"}, "service_tier"),
        ({"model": "other"}, "model"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(server: Server, fields: dict[str, Any], param: str | None) -> None:
    answer = server.http.post("/v1/responses", json={"model": NAME, "input": "hi", **fields})
    assert answer.status_code == (404 if param == "model" else 400), answer.text
    assert answer.json()["error"]["param"] == param


def test_items_become_turns() -> None:
    items: list[Any] = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": "a"},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "b", "annotations": []}]},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "c"},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "so"}]},
        {"type": "function_call", "call_id": "2", "name": "f", "arguments": "{}"},
    ]
    body = ResponsesRequest.model_validate({"model": "m", "input": items, "instructions": "x"})
    turns = [message.for_template() for message in body.chat().messages]
    assert [turn["role"] for turn in turns] == ["system", "system", "user", "assistant", "tool", "assistant"]
    assert turns[3]["reasoning_content"] == "hm" and turns[3]["tool_calls"][0]["id"] == "1"
    assert turns[4] == {"role": "tool", "content": "c", "tool_call_id": "1"}
    assert turns[5]["reasoning_content"] == "so" and turns[5]["tool_calls"][0]["id"] == "2"


def test_an_item_is_closed_by_one_of_another_kind() -> None:
    output = ResponseOutput("r")
    deltas: list[dict[str, Any]] = [{"reasoning_content": "hm"}, {"content": "so"}, {"content": " be it"}]
    deltas += [{"tool_calls": [{"index": 0, "id": "1", "function": {"name": "f", "arguments": ""}}]}]
    deltas += [{"tool_calls": [{"index": 0, "function": {"arguments": "{}"}}]}]
    events = b"".join(map(output.push, deltas)) + output.end(cut=False)
    told = [json.loads(line.removeprefix("data: ")) for line in events.decode().splitlines() if line[:5] == "data:"]
    assert [event["sequence_number"] for event in told] == list(range(len(told)))
    done = [event["item"] for event in told if event["type"] == "response.output_item.done"]
    assert done == output.items and [item["type"] for item in done] == ["reasoning", "message", "function_call"]
    assert done[1]["content"][0]["text"] == "so be it" and done[2]["arguments"] == "{}"
    assert ResponseOutput("r").end(cut=True).count(b'"incomplete"') == 1
