"""Where a chat's guide begins."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from phalanx.server.chat_job import chat_job, guide_of, opens_reasoning
from phalanx.server.errors import ApiError
from phalanx.server.schema_chat import ChatRequest

TOOLS: list[Any] = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]


@pytest.mark.parametrize(
    "fields", [{"response_format": {"type": "json_object"}}, {"tools": TOOLS, "tool_choice": "required"}]
)
def test_it_begins_behind_the_thinking_that_the_prompt_has_opened(fields: dict[str, Any]) -> None:
    service: Any = SimpleNamespace(reasoning_format="think", tool_format="hermes", special_tokens={})
    body = ChatRequest.model_validate({"model": "m", "messages": [{"role": "user", "content": "x"}], **fields})
    opened = opens_reasoning(service, "<user>x<assistant><think>\n")
    assert opened and not opens_reasoning(service, "<think>well</think>")
    guide = guide_of(service, body, opened)
    assert guide is not None and guide.after == "</think>"
    plain = guide_of(service, body, False)
    assert plain is not None and plain.after == "" and plain.text == guide.text
    free = ChatRequest.model_validate({"model": "m", "messages": [{"role": "user", "content": "x"}]})
    assert guide_of(service, free, opened) is None


def test_a_server_without_a_format_of_calls_names_those_there_are() -> None:
    async def chat_text(*given: Any) -> str:
        return "x"

    def let(*given: Any) -> None: ...

    service: Any = SimpleNamespace(
        reasoning_format=None, tool_format=None, check_model=let, check_open=let, chat_text=chat_text
    )
    asked = {"model": "m", "messages": [{"role": "user", "content": "x"}], "tools": TOOLS, "tool_choice": "required"}
    record: Any = None
    with pytest.raises(ApiError, match=r"--tool-format \(hermes, llama3, mistral\)"):
        asyncio.run(chat_job(service, ChatRequest.model_validate(asked), record))
