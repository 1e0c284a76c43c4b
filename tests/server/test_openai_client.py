"""The official client, unmodified, against a server of the tiny model."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import openai
import pytest

from phalanx import LLM
from tests.server.running import NAME, Server

pytestmark = pytest.mark.xdist_group("server")
QUESTION = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def llm(tiny_folder: Path):
    with LLM(tiny_folder, num_blocks=600, block_size=8, max_model_len=4096) as made:
        yield made


def test_models_are_listed(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [NAME]
    assert client.models.retrieve(NAME).id == NAME
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("gpt-4")
    assert caught.value.code == "model_not_found"


def test_completions_are_those_of_the_library(client: openai.OpenAI, llm: LLM) -> None:
    prompts = ["hello", "tell me", "x"]
    answer = client.completions.create(model=NAME, prompt=prompts, max_tokens=12, temperature=0)
    expected = llm.generate(prompts, max_tokens=12)
    assert [choice.text for choice in answer.choices] == [output.text for output in expected]
    assert [choice.finish_reason for choice in answer.choices] == [o.outputs[0].finish_reason for o in expected]
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert answer.object == "text_completion" and answer.id.startswith("cmpl-") and answer.model == NAME
    prompt_tokens = sum(len(output.prompt_token_ids) for output in expected)
    completion_tokens = sum(len(output.outputs[0].token_ids) for output in expected)
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (prompt_tokens, completion_tokens)
    assert usage.total_tokens == prompt_tokens + completion_tokens


@pytest.mark.parametrize("prompt", [[5, 6, 7], [[5, 6, 7], [8, 9]]])
def test_token_ids_are_prompts(client: openai.OpenAI, llm: LLM, prompt: list) -> None:
    answer = client.completions.create(model=NAME, prompt=prompt, max_tokens=5, temperature=0)
    expected = llm.generate(prompt, max_tokens=5)
    assert [choice.text for choice in answer.choices] == [output.text for output in expected]


def test_chat_goes_through_the_template(client: openai.OpenAI, llm: LLM) -> None:
    answer = client.chat.completions.create(model=NAME, messages=QUESTION, max_completion_tokens=9, temperature=0)
    expected = llm.chat(QUESTION, max_tokens=9)[0]
    assert answer.choices[0].message.content == expected.text
    assert answer.choices[0].message.role == "assistant" and answer.choices[0].message.tool_calls is None
    assert answer.usage.prompt_tokens == len(expected.prompt_token_ids)
    parts = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    again = client.chat.completions.create(model=NAME, messages=parts, max_tokens=9, temperature=0)
    assert again.choices[0].message.content == expected.text


def test_a_stream_of_completions_concatenates_to_the_whole(client: openai.OpenAI, llm: LLM) -> None:
    asked = {"model": NAME, "prompt": ["hello", "x"], "max_tokens": 20, "temperature": 0}
    texts, reasons, last = {0: "", 1: ""}, {}, None
    for chunk in client.completions.create(stream=True, stream_options={"include_usage": True}, **asked):
        last = chunk
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason
    whole = client.completions.create(**asked)
    assert [texts[0], texts[1]] == [choice.text for choice in whole.choices]
    assert [reasons[0], reasons[1]] == [choice.finish_reason for choice in whole.choices]
    assert last.choices == [] and last.usage == whole.usage


def test_a_stream_of_chat_begins_with_the_role_and_ends_with_the_usage(client: openai.OpenAI) -> None:
    asked = {"model": NAME, "messages": QUESTION, "max_tokens": 12, "temperature": 0}
    chunks = list(client.chat.completions.create(stream=True, stream_options={"include_usage": True}, **asked))
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"} and len({c.id for c in chunks}) == 1
    first, *middle, end, usage = chunks
    assert (first.choices[0].delta.role, first.choices[0].delta.content) == ("assistant", "")
    assert all(chunk.choices[0].finish_reason is None and chunk.usage is None for chunk in [first, *middle])
    assert end.choices[0].finish_reason in ("stop", "length") and end.choices[0].delta.content is None
    whole = client.chat.completions.create(**asked)
    assert "".join(chunk.choices[0].delta.content for chunk in middle) == whole.choices[0].message.content
    assert usage.choices == [] and usage.usage.completion_tokens == whole.usage.completion_tokens
    without = list(client.chat.completions.create(stream=True, **asked))
    assert len(without) == len(chunks) - 1 and all(chunk.usage is None for chunk in without)


def test_n_answers_have_seeds_of_their_own(client: openai.OpenAI) -> None:
    asked = {"model": NAME, "prompt": "hello", "max_tokens": 8, "n": 3, "seed": 7, "temperature": 1}
    first, second = (client.completions.create(**asked) for _ in range(2))
    texts = [choice.text for choice in first.choices]
    assert texts == [choice.text for choice in second.choices] and len(set(texts)) == 3
    negative = [client.completions.create(**{**asked, "seed": seed}).choices[0].text for seed in (-5, -5, 3)]
    assert negative[0] == negative[1] != negative[2]
    streamed = {}
    for chunk in client.completions.create(stream=True, **asked):
        for choice in chunk.choices:
            streamed[choice.index] = streamed.get(choice.index, "") + choice.text
    assert [streamed[index] for index in range(3)] == texts


def test_logprobs_of_completions(client: openai.OpenAI, llm: LLM) -> None:
    asked = {"model": NAME, "prompt": "hello", "max_tokens": 6, "temperature": 0, "logprobs": 2}
    found = client.completions.create(**asked).choices[0].logprobs
    expected = llm.generate("hello", max_tokens=6, logprobs=2)[0].outputs[0].logprobs
    assert len(found.tokens) == len(found.token_logprobs) == len(found.text_offset) == len(expected)
    for value, top, entry in zip(found.token_logprobs, found.top_logprobs, expected, strict=True):
        chosen = next(iter(entry.values()))
        assert value == pytest.approx(chosen, abs=1e-4) and value <= 0
        assert sorted(top.values()) == pytest.approx(sorted(entry.values()), abs=1e-4)
    streamed: dict = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for chunk in client.completions.create(stream=True, **asked):
        for choice in chunk.choices:
            if choice.logprobs is not None:
                for name, values in streamed.items():
                    values += getattr(choice.logprobs, name)
    assert streamed["tokens"] == found.tokens and streamed["text_offset"] == found.text_offset
    assert streamed["token_logprobs"] == pytest.approx(found.token_logprobs, abs=1e-4)


def test_echo_gives_the_prompts_logprobs(client: openai.OpenAI, llm: LLM) -> None:
    answer = client.completions.create(model=NAME, prompt="hello", max_tokens=0, echo=True, logprobs=1)
    choice, expected = answer.choices[0], llm.generate("hello", max_tokens=0, prompt_logprobs=1)[0]
    assert (choice.text, choice.finish_reason) == ("hello", "length")
    assert choice.logprobs.tokens == ["hell", "o"] and choice.logprobs.text_offset == [0, 4]
    ids = expected.prompt_token_ids
    values = [
        None if entry is None else entry[token] for token, entry in zip(ids, expected.prompt_logprobs, strict=True)
    ]
    assert choice.logprobs.token_logprobs[0] is None is choice.logprobs.top_logprobs[0]
    assert choice.logprobs.token_logprobs[1] == pytest.approx(values[1], abs=1e-4)
    drawn = client.completions.create(model=NAME, prompt="hello", max_tokens=3, echo=True, logprobs=0, temperature=0)
    plain = client.completions.create(model=NAME, prompt="hello", max_tokens=3, temperature=0)
    assert drawn.choices[0].text == "hello" + plain.choices[0].text
    assert len(drawn.choices[0].logprobs.tokens) == 2 + plain.usage.completion_tokens
    streamed = client.completions.create(
        model=NAME, prompt=[ids], max_tokens=3, echo=True, logprobs=0, temperature=0, stream=True
    )
    assert "".join(chunk.choices[0].text for chunk in streamed) == drawn.choices[0].text


def test_logprobs_of_chat_have_bytes_and_the_likeliest(client: openai.OpenAI, llm: LLM) -> None:
    asked = {"model": NAME, "messages": QUESTION, "max_tokens": 8, "temperature": 0, "logprobs": True}
    choice = client.chat.completions.create(top_logprobs=3, **asked).choices[0]
    expected = llm.chat(QUESTION, max_tokens=8, logprobs=3)[0].outputs[0].logprobs
    assert [len(entry.top_logprobs) for entry in choice.logprobs.content] == [3] * len(expected)
    for entry, own in zip(choice.logprobs.content, expected, strict=True):
        assert entry.logprob == pytest.approx(next(iter(own.values())), abs=1e-4)
        values = [top.logprob for top in entry.top_logprobs]
        assert values == sorted(values, reverse=True) and all(math.isfinite(value) for value in values)
    text = bytes(byte for entry in choice.logprobs.content for byte in entry.bytes).decode(errors="replace")
    assert text.startswith(choice.message.content[:3])
    none = client.chat.completions.create(**asked).choices[0].logprobs.content
    assert [entry.top_logprobs for entry in none] == [[]] * len(expected)
    streamed = client.chat.completions.create(top_logprobs=3, stream=True, **asked)
    parts = [chunk.choices[0].logprobs for chunk in streamed if chunk.choices]
    entries = [entry for part in parts if part is not None for entry in part.content]
    assert [entry.token for entry in entries] == [entry.token for entry in choice.logprobs.content]


def test_settings_beyond_openai(client: openai.OpenAI, llm: LLM) -> None:
    more = {"top_k": 5, "min_p": 0.05, "repetition_penalty": 1.3, "ignore_eos": True, "min_tokens": 3}
    answer = client.completions.create(
        model=NAME, prompt="hello", max_tokens=9, seed=3, temperature=0.9, logit_bias={"70": 3}, extra_body=more
    )
    expected = llm.generate("hello", max_tokens=9, seed=3, temperature=0.9, logit_bias={70: 3}, **more)[0]
    assert answer.choices[0].text == expected.text
    ids = expected.outputs[0].token_ids
    stopped = client.completions.create(
        model=NAME,
        prompt="hello",
        max_tokens=9,
        seed=3,
        temperature=0.9,
        logit_bias={"70": 3},
        extra_body={**more, "min_tokens": 0, "stop_token_ids": [ids[4]]},
    )
    assert stopped.choices[0].finish_reason == "stop" and stopped.usage.completion_tokens == ids.index(ids[4]) + 1


def test_stop_texts_are_never_seen(client: openai.OpenAI) -> None:
    asked = {"model": NAME, "prompt": "stop here", "max_tokens": 40, "temperature": 0}
    whole = client.completions.create(**asked).choices[0].text
    stop = whole[10:13]
    for given in (stop, [stop, "never seen"]):
        choice = client.completions.create(stop=given, **asked).choices[0]
        assert (choice.text, choice.finish_reason) == (whole[: whole.index(stop)], "stop")
        assert choice.stop_reason == stop
        chunks = client.completions.create(stop=given, stream=True, **asked)
        assert "".join(chunk.choices[0].text for chunk in chunks) == choice.text
    kept = client.completions.create(stop=stop, extra_body={"include_stop_str_in_output": True}, **asked)
    assert kept.choices[0].text.endswith(stop)


def test_the_rest_of_the_context_is_what_is_left(server: Server, client: openai.OpenAI) -> None:
    prompt = [[9] * 4090]
    for more in ({}, {"max_tokens": None}):
        answer = server.complete(prompt=prompt, ignore_eos=True, **more).json()
        assert answer["usage"]["completion_tokens"] == 6
    with pytest.raises(openai.BadRequestError, match=r"4090 tokens and max_tokens=7 are above the context of 4096"):
        client.completions.create(model=NAME, prompt=prompt, max_tokens=7)


def test_the_client_raises_its_own_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="not served here"):
        client.completions.create(model="other", prompt="x")
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=NAME, prompt="x", suffix="y")
    assert caught.value.param == "suffix" and caught.value.type == "invalid_request_error"
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=NAME, messages=[{"role": "wizard", "content": "hi"}])
    assert "unknown role wizard" in str(caught.value) and caught.value.param == "messages"


def test_json_follows_the_schema(client: openai.OpenAI) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    wanted = {"type": "json_schema", "json_schema": {"name": "thing", "schema": schema, "strict": True}}
    answer = client.chat.completions.create(
        model=NAME, messages=QUESTION, response_format=wanted, max_tokens=40, temperature=1, seed=1
    )
    assert json.loads(answer.choices[0].message.content)["a"] in (1, 2)
    chosen = client.completions.create(
        model=NAME, prompt="hi", seed=1, extra_body={"structured_outputs": {"choice": ["yes", "no"]}}
    )
    assert chosen.choices[0].text in ("yes", "no") and chosen.choices[0].finish_reason == "stop"
    with pytest.raises(openai.BadRequestError, match=r"unclosed|regex"):
        client.completions.create(model=NAME, prompt="hi", extra_body={"structured_outputs": {"regex": "("}})


WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Paris", "Rome"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_functions_are_called(client: openai.OpenAI, choice: Any) -> None:
    asked = {"model": NAME, "messages": QUESTION, "tools": [WEATHER], "tool_choice": choice, "max_tokens": 150}
    asked |= {"parallel_tool_calls": False, "seed": 1}
    answer = client.chat.completions.create(**asked).choices[0]
    assert answer.finish_reason == "tool_calls" and answer.message.content is None
    (call,) = answer.message.tool_calls
    assert call.function.name == "weather" and json.loads(call.function.arguments)["city"] in ("Paris", "Rome")
    name, arguments, reason = "", "", None
    for chunk in client.chat.completions.create(stream=True, **asked):
        for delta in chunk.choices[0].delta.tool_calls or ():
            assert delta.index == 0
            name += delta.function.name or ""
            arguments += delta.function.arguments or ""
        reason = chunk.choices[0].finish_reason or reason
    assert (name, arguments, reason) == ("weather", call.function.arguments, "tool_calls")
    # What was called, and what it gave, are part of the next turn.
    turn = [
        *QUESTION,
        {"role": "assistant", "content": "", "tool_calls": [call.model_dump()]},
        {"role": "user", "content": "sunny"},
    ]
    again = client.chat.completions.create(model=NAME, messages=turn, tools=[WEATHER], max_tokens=3)
    assert again.usage.completion_tokens <= 3
