"""Content, reasoning and calls out of text: real answers of each format, and any split of any text."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from phalanx.server.parsing import (
    Content,
    OutputParser,
    Piece,
    Reasoning,
    ToolArguments,
    ToolCall,
    guess_formats,
    merged,
    reasoning_formats,
    tool_formats,
)


def tool(name: str, **properties: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}


TOOLS = [tool("get_weather", city={"type": "string"}), tool("add")]


def read(parser: OutputParser, parts: list[str]) -> list[Piece]:
    pieces = [piece for part in parts for piece in parser.push(part)]
    return merged([*pieces, *parser.close()])


def plain(pieces: list[Piece]) -> list[Any]:
    """Without the ids, which are random."""
    return [("call", piece.index, piece.name) if isinstance(piece, ToolCall) else piece for piece in pieces]


def parse(text: str, tool_format: str | None = None, reasoning: str | None = None, **options: Any) -> list[Any]:
    whole = plain(read(OutputParser(tool_format, reasoning, **{"tools": TOOLS, **options}), [text]))
    single = plain(read(OutputParser(tool_format, reasoning, **{"tools": TOOLS, **options}), list(text)))
    assert whole == single
    return whole


def weather(index: int = 0, arguments: str = '{"city": "Paris, \\"}{"}') -> list[Any]:
    return [("call", index, "get_weather"), ToolArguments(index, arguments)]


ARGUMENTS = '{"city": "Paris, \\"}{"}'


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            f'<tool_call>\n{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n</tool_call>',
            weather(),
        ),
        # Hermes 2 Pro puts the arguments first.
        (f'<tool_call>\n{{"arguments": {ARGUMENTS}, "name": "get_weather"}}\n</tool_call>\n', weather()),
        (
            f'Let me look.\n\n<tool_call>\n{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n</tool_call>\n'
            '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>',
            [Content("Let me look."), *weather(), ("call", 1, "add"), ToolArguments(1, "{}")],
        ),
        ('<tool_call>{"name": "add"}</tool_call> done', [("call", 0, "add"), ToolArguments(0, "{}"), Content(" done")]),
        # Broken off.
        (
            '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Par',
            [("call", 0, "get_weather"), ToolArguments(0, '{"city": "Par')],
        ),
        ('<tool_call>\n{"name": "get_wea', [Content('<tool_call>\n{"name": "get_wea')]),
        # No calls.
        ("a <tool_call> is a tag", [Content("a <tool_call> is a tag")]),
        ('<tool_call>{"name": "other"}</tool_call>', [Content('<tool_call>{"name": "other"}</tool_call>')]),
        ('<tool_call>{"name": "add", "arguments": "x"}', [Content('<tool_call>{"name": "add", "arguments": "x"}')]),
        ("text with an end \n", [Content("text with an end \n")]),
        ("<tool_cal", [Content("<tool_cal")]),
    ],
)
def test_hermes(text: str, expected: list[Any]) -> None:
    assert parse(text, "hermes") == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f'{{"name": "get_weather", "parameters": {ARGUMENTS}}}', weather()),
        (f'<|python_tag|>{{"type": "function", "name": "get_weather", "parameters": {ARGUMENTS}}}', weather()),
        (
            f'{{"name": "get_weather", "parameters": {ARGUMENTS}}}; {{"name": "add", "parameters": {{"a": 1}}}}',
            [*weather(), ("call", 1, "add"), ToolArguments(1, '{"a": 1}')],
        ),
        ('{"name": "Bob", "age": 3}', [Content('{"name": "Bob", "age": 3}')]),
        ("It is warm. {}", [Content("It is warm. {}")]),
        ('<|python_tag|>brave_search.call(query="x")', [Content('<|python_tag|>brave_search.call(query="x")')]),
        ("  ", [Content("  ")]),
    ],
)
def test_llama3(text: str, expected: list[Any]) -> None:
    assert parse(text, "llama3") == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f'[TOOL_CALLS] [{{"name": "get_weather", "arguments": {ARGUMENTS}}}]', weather()),
        (
            f'[TOOL_CALLS][{{"name": "get_weather", "arguments": {ARGUMENTS}, "id": "VvvODy9mT"}}, '
            '{"name": "add", "arguments": {}}]',
            [*weather(), ("call", 1, "add"), ToolArguments(1, "{}")],
        ),
        (f"[TOOL_CALLS]get_weather[ARGS]{ARGUMENTS}", weather()),
        (
            f"Wait. [TOOL_CALLS]get_weather[CALL_ID]abcDEF123[ARGS]{ARGUMENTS}[TOOL_CALLS]add[ARGS]{{}}",
            [Content("Wait."), *weather(), ("call", 1, "add"), ToolArguments(1, "{}")],
        ),
        (f"[TOOL_CALLS]get_weather{ARGUMENTS}", weather()),
        ("[TOOL_CALLS]other[ARGS]{}", [Content("[TOOL_CALLS]other[ARGS]{}")]),
        ("[TOOL_CALLS] said I", [Content("[TOOL_CALLS] said I")]),
        ("[TOOL_CALLS][]", [Content("[TOOL_CALLS][]")]),
        ("[TOOL_CALLS]", [Content("[TOOL_CALLS]")]),
    ],
)
def test_mistral(text: str, expected: list[Any]) -> None:
    assert parse(text, "mistral") == expected


@pytest.mark.parametrize(
    ("text", "opened", "expected"),
    [
        ("<think>\nHm.\n</think>\n\nYes.", False, [Reasoning("Hm."), Content("Yes.")]),
        ("Hm.\nWell.\n</think>\n\nYes.", True, [Reasoning("Hm.\nWell."), Content("Yes.")]),
        ("<think>\nHm.\n</think>Yes.", True, [Reasoning("Hm."), Content("Yes.")]),
        ("<think>\n\n</think>\n\nYes.", False, [Content("Yes.")]),
        ("Yes <think>no</think>", False, [Content("Yes <think>no</think>")]),
        ("<think>too long", False, [Reasoning("too long")]),
        ("a </thin", True, [Reasoning("a </thin")]),
        ("<thi", False, [Content("<thi")]),
    ],
)
def test_reasoning(text: str, opened: bool, expected: list[Any]) -> None:
    assert parse(text, None, "think", prompt_opens_reasoning=opened) == expected


def test_reasoning_then_calls() -> None:
    text = '<think>\nI <tool_call> it.\n</think>\n\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    expected = [Reasoning("I <tool_call> it."), ("call", 0, "add"), ToolArguments(0, '{"a": 1}')]
    assert parse(text, "hermes", "think") == expected
    magistral = "[THINK]Hm.[/THINK][TOOL_CALLS]add[ARGS]{}"
    assert parse(magistral, "mistral", "mistral") == [Reasoning("Hm."), ("call", 0, "add"), ToolArguments(0, "{}")]


def test_arguments_come_as_they_are_written() -> None:
    parser = OutputParser("hermes", None, tools=TOOLS)
    assert parser.push('<tool_call>\n{"name": "get_weather"') == []
    (call, begun) = parser.push(', "arguments": {"ci')
    assert isinstance(call, ToolCall) and call.name == "get_weather" and call.id
    assert begun == ToolArguments(0, '{"ci')
    assert parser.push('ty": "P') == [ToolArguments(0, 'ty": "P')]
    assert parser.push('aris"}') == [ToolArguments(0, 'aris"}')]
    assert parser.push("}\n</tool_call>") == [] == parser.close()


def test_without_tools_any_name_is_taken() -> None:
    assert parse('<tool_call>{"name": "other"}</tool_call>', "hermes", tools=())[0] == ("call", 0, "other")


FRAGMENTS = st.sampled_from(
    [
        "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>", "<think>", "</think>",
        "[THINK]", "[/THINK]", "{", "}", "[", "]", ",", ";", ":", '"', "\\", "\n", " ", '"name"', '"add"',
        '"arguments"', '"parameters"', "add", "get_weather", '{"name": "add", "arguments": {"a": [1, "}"]}}', "1",
        "null", "é😀", "x", "<",
        '{"arguments": {"b": {}}, "name": "get_weather"}', '{"name": "add", "parameters": {}}', "[ARGS]{}",
    ]
)  # fmt: skip


@given(
    fragments=st.lists(FRAGMENTS, max_size=12),
    cuts=st.lists(st.integers(0, 200), max_size=8),
    tool_format=st.sampled_from([None, *tool_formats()]),
    reasoning=st.sampled_from([None, *reasoning_formats()]),
    opened=st.booleans(),
)
@example(["[TOOL_CALLS]", "add", "[CALL_ID]", "x", "[ARGS]{}"], [], "mistral", None, False)
@settings(max_examples=600, deadline=None)
def test_the_split_of_a_text_changes_nothing(
    fragments: list[str], cuts: list[int], tool_format: str | None, reasoning: str | None, opened: bool
) -> None:
    text = "".join(fragments)
    places = sorted({min(cut, len(text)) for cut in cuts})
    parts = [text[start:end] for start, end in zip([0, *places], [*places, len(text)], strict=True)]

    def answer(pieces: list[str]) -> list[Any]:
        return plain(read(OutputParser(tool_format, reasoning, opened, TOOLS), pieces))

    whole = answer([text])
    assert answer(parts) == whole == answer(list(text))
    # Nothing but white space, marks and what stands around arguments gets lost.
    if tool_format is None and reasoning is None:
        assert "".join(piece.text for piece in whole) == text
    if tool_format is not None and not any(isinstance(piece, tuple) for piece in whole) and reasoning is None:
        assert "".join(piece.text for piece in whole) == text


@given(
    arguments=st.dictionaries(
        st.text(max_size=5),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.text(max_size=8),
            lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
            max_leaves=6,
        ),
        max_size=4,
    ),
    cuts=st.lists(st.integers(0, 300), max_size=6),
    tool_format=st.sampled_from(tool_formats()),
    ascii=st.booleans(),
    indent=st.sampled_from([None, 1]),
)
@settings(max_examples=200, deadline=None)
def test_any_arguments_arrive(
    arguments: dict[str, Any], cuts: list[int], tool_format: str, ascii: bool, indent: int | None
) -> None:
    written = json.dumps(arguments, ensure_ascii=ascii, indent=indent)
    text = {
        "hermes": f'<tool_call>\n{{"name": "add", "arguments": {written}}}\n</tool_call>',
        "llama3": f'{{"name": "add", "parameters": {written}}}',
        "mistral": f"[TOOL_CALLS]add[ARGS]{written}",
    }[tool_format]
    places = sorted({min(cut, len(text)) for cut in cuts})
    parts = [text[start:end] for start, end in zip([0, *places], [*places, len(text)], strict=True)]
    pieces = read(OutputParser(tool_format, None, tools=TOOLS), parts)
    assert plain(pieces) == [("call", 0, "add"), ToolArguments(0, written)]


def test_formats_are_guessed_by_their_marks() -> None:
    assert guess_formats("{% if tools %}<tool_call>{% endif %}") == ("hermes", None)
    assert guess_formats("<tool_call> ... </think>") == ("hermes", "think")
    assert guess_formats("<|python_tag|>") == ("llama3", None)
    assert guess_formats("x", {"[TOOL_CALLS]", "[THINK]", "[/THINK]"}) == ("mistral", "mistral")
    assert guess_formats("<tool_call>\n<function=") == (None, None)
    assert guess_formats(None) == (None, None)


def test_unknown_formats_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown tool format 'x': expected one of hermes"):
        OutputParser("x", None)
    with pytest.raises(ValueError, match="unknown reasoning format 'x'"):
        OutputParser(None, "x")


def test_marks_that_are_special_tokens_are_asked_for() -> None:
    assert OutputParser("mistral", None).needs_special_tokens and OutputParser("llama3", None).needs_special_tokens
    assert not OutputParser("hermes", "think").needs_special_tokens
