"""Where a chat's guide begins."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from phalanx.server.routes_chat import _guide, _opens_reasoning
from phalanx.server.schema_chat import ChatRequest

TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]


@pytest.mark.parametrize(
    "fields", [{"response_format": {"type": "json_object"}}, {"tools": TOOLS, "tool_choice": "required"}]
)
def test_it_begins_behind_the_thinking_that_the_prompt_has_opened(fields: dict[str, Any]) -> None:
    service: Any = SimpleNamespace(reasoning_format="think", tool_format="hermes", special_tokens={})
    body = ChatRequest.model_validate({"model": "m", "messages": [{"role": "user", "content": "x"}], **fields})
    opened = _opens_reasoning(service, "<user>x<assistant><think>\n")
    assert opened and not _opens_reasoning(service, "<think>well</think>")
    guide = _guide(service, body, opened)
    assert guide is not None and guide.after == "</think>"
    plain = _guide(service, body, False)
    assert plain is not None and plain.after == "" and plain.text == guide.text
    free = ChatRequest.model_validate({"model": "m", "messages": [{"role": "user", "content": "x"}]})
    assert _guide(service, free, opened) is None
