"""Guides that force calls: what they allow is what the parser of the format reads."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import numpy as np
import pytest

from phalanx.engine.guides import Guide, GuideCompiler, token_masks
from phalanx.server.parsing import OutputParser, ToolArguments, ToolCall, merged, tool_formats, tool_guide
from tests.tiny_tokenizer import tiny_tokenizer

TOKENIZER = tiny_tokenizer()
COMPILER = GuideCompiler(TOKENIZER)
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 5},
        "unit": {"enum": ["C", "F"]},
        "days": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9}, "maxItems": 3},
    },
    "required": ["city", "unit"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "add-1"}},
]


def written(guide: Guide, seed: int) -> str:
    """Random text that the guide accepts; it ends where it can."""
    drawing = random.Random(seed)
    matcher = COMPILER.compile(guide).matcher()
    tokens: list[int] = []
    for _ in range(2000):
        bits = np.unpackbits(token_masks([matcher], 263).view(np.uint8)[0], bitorder="little")
        if bits[TOKENIZER.eos_token_id]:
            break
        tokens.append(drawing.choice(np.flatnonzero(bits).tolist()))
        matcher.advance(tokens[-1])
        assert matcher.error is None
        if matcher.complete:
            break
    else:
        raise AssertionError("the guide never ends")
    return str(TOKENIZER.decode(tokens))


@pytest.mark.parametrize("tool_format", tool_formats())
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
@pytest.mark.parametrize("special", [{}, {"[TOOL_CALLS]": 0, "[ARGS]": 1}])
def test_forced_calls_are_read_as_calls(tool_format: str, choice: Any, special: dict[str, int]) -> None:
    guide = tool_guide(tool_format, TOOLS, choice, special)
    assert guide is not None
    names = set()
    for seed in range(8):
        # The tiny tokenizer has no tokens of these names: two others stand in for them.
        text = written(guide, seed).replace("<unk>", "[TOOL_CALLS]").replace("<s>", "[ARGS]")
        parser = OutputParser(tool_format, None, tools=TOOLS)
        pieces = merged([*parser.push(text), *parser.close()])
        assert pieces
        for call, arguments in zip(pieces[::2], pieces[1::2], strict=True):
            assert isinstance(call, ToolCall) and isinstance(arguments, ToolArguments)
            schema = SCHEMA if call.name == "get_weather" else {"type": "object", "maxProperties": 0}
            jsonschema.validate(json.loads(arguments.text), schema)
            names.add(call.name)
    assert names == ({"get_weather", "add-1"} if choice == "required" else {"get_weather"})


def test_required_may_be_several_calls_and_a_named_function_is_one() -> None:
    call = '<tool_call>\n{"name": "get_weather", "arguments": {"city":"x","unit":"C"}}\n</tool_call>'

    def accepts(text: str, **options: Any) -> bool:
        guide = tool_guide("hermes", TOOLS, **options)
        assert guide is not None
        matcher = COMPILER.compile(guide).matcher()
        for token in TOKENIZER.encode(text, add_special_tokens=False):
            matcher.advance(token)
        return matcher.error is None

    named = {"type": "function", "function": {"name": "get_weather"}}
    assert accepts(f"{call}\n{call}", tool_choice="required")
    assert not accepts(f"{call}\n{call}", tool_choice="required", parallel=False)
    assert not accepts(f"{call}\n{call}", tool_choice=named) and accepts(call, tool_choice=named)


def test_free_choices_force_nothing() -> None:
    assert [tool_guide("hermes", TOOLS, choice) for choice in (None, "auto", "none")] == [None] * 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("hermes", TOOLS, "x"), "tool_choice='x': expected"),
        (("hermes", [], "required"), "without tools"),
        (("hermes", TOOLS, {"function": {"name": "y"}}), "names the function 'y', which is not among the tools"),
        (("y", TOOLS, "required"), "unknown tool format 'y'"),
        (("hermes", [{"function": {"name": "f", "parameters": 3}}], "required"), "parameters of the function 'f'"),
    ],
)
def test_impossible_choices_are_refused(arguments: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tool_guide(*arguments)


def test_a_schema_that_cannot_be_followed_is_refused_by_name() -> None:
    tools = [{"function": {"name": "f", "parameters": {"properties": {"a": {"not": {"type": "null"}}}}}}]
    guide = tool_guide("hermes", tools, "required")
    assert guide is not None
    with pytest.raises(ValueError, match=r'the grammar cannot be used: .*Unimplemented keys: \["not"\]'):
        COMPILER.compile(guide)
