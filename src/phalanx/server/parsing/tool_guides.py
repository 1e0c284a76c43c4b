"""Guides that force a model to call functions, with arguments that follow their JSON schemas."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from phalanx.engine.guides import Guide

_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
_ONE_SPACE = {"x-guidance": {"whitespace_pattern": " ?"}}


def tool_guide(
    tool_format: str,
    tools: Sequence[Mapping[str, Any]],
    tool_choice: str | Mapping[str, Any] | None,
    special_tokens: Mapping[str, int] | None = None,
    parallel: bool = True,
) -> Guide | None:
    """The guide of an answer that is nothing but calls; None where the choice ("auto", "none") forces nothing.

    Args:
        tool_format: of ``tool_formats()``.
        tools: as in the request, ``{"type": "function", "function": {"name": ..., "parameters": {...}}}``.
        tool_choice: "required": one call or more; ``{"type": "function", "function": {"name": ...}}``: one of this.
        special_tokens: ids of the tokenizer's special tokens, by text: marks among them are written as these tokens.
        parallel: whether "required" may be several calls.

    Raises:
        ValueError: an unknown format or function, or a function without a usable schema.
    """
    if tool_choice in (None, "auto", "none"):
        return None
    functions = [tool["function"] for tool in tools]
    if isinstance(tool_choice, Mapping):
        name = tool_choice["function"]["name"]
        functions = [function for function in functions if function["name"] == name]
        parallel = False
        if not functions:
            raise ValueError(f"tool_choice names the function {name!r}, which is not among the tools")
    elif tool_choice != "required":
        raise ValueError(f'tool_choice={tool_choice!r}: expected "auto", "none", "required" or a function')
    if not functions:
        raise ValueError('tool_choice="required" without tools: give one at least')
    if tool_format not in _WRITERS:
        raise ValueError(f"unknown tool format {tool_format!r}: expected one of {', '.join(_WRITERS)}")
    marks = _Marks(special_tokens or {})
    rules = _WRITERS[tool_format](marks, [function["name"] for function in functions], parallel)
    schemas = [{**_ONE_SPACE, **_parameters(function)} for function in functions]
    rules += [f"arguments_{index}: %json {json.dumps(schema)}" for index, schema in enumerate(schemas)]
    return Guide(kind="grammar", text="\n".join(rules))


class _Marks:
    """Literals of a grammar; a special token is named by its id, as its text would be spelled in others."""

    def __init__(self, special_tokens: Mapping[str, int]) -> None:
        self._ids = special_tokens

    def __contains__(self, mark: str) -> bool:
        return mark in self._ids

    def __call__(self, mark: str) -> str:
        return f"<[{self._ids[mark]}]>" if mark in self._ids else json.dumps(mark)


def _parameters(function: Mapping[str, Any]) -> Mapping[str, Any]:
    schema = function.get("parameters") or _NO_PARAMETERS
    if not isinstance(schema, Mapping):
        raise ValueError(f"the parameters of the function {function['name']!r} are not a JSON schema")
    return {"type": "object", **schema}


def _calls(names: Sequence[str], member: str) -> list[str]:
    """Rules ``call`` and ``call_0``...: the JSON object of a call, as the chat templates write it."""
    rules = ["call: " + " | ".join(f"call_{index}" for index in range(len(names)))]
    for index, name in enumerate(names):
        head = f'{{"name": {json.dumps(name)}, "{member}": '
        rules.append(f'call_{index}: {json.dumps(head)} arguments_{index} "}}"')
    return rules


def _hermes(marks: _Marks, names: Sequence[str], parallel: bool) -> list[str]:
    more = ' ("\\n" marked)*' if parallel else ""
    marked = f'marked: {marks("<tool_call>")} "\\n" call "\\n" {marks("</tool_call>")}'
    return [f"start: marked{more}", marked, *_calls(names, "arguments")]


def _llama3(marks: _Marks, names: Sequence[str], parallel: bool) -> list[str]:
    more = ' ("; " call)*' if parallel else ""
    return [f"start: call{more}", *_calls(names, "parameters")]


def _mistral(marks: _Marks, names: Sequence[str], parallel: bool) -> list[str]:
    if "[ARGS]" not in marks:
        more = ' (", " call)*' if parallel else ""
        return [f'start: {marks("[TOOL_CALLS]")} "[" call{more} "]"', *_calls(names, "arguments")]
    rules = [f"start: call{'+' if parallel else ''}"]
    rules.append("call: " + " | ".join(f"call_{index}" for index in range(len(names))))
    for index, name in enumerate(names):
        rules.append(f"call_{index}: {marks('[TOOL_CALLS]')} {json.dumps(name)} {marks('[ARGS]')} arguments_{index}")
    return rules


_WRITERS = {"hermes": _hermes, "llama3": _llama3, "mistral": _mistral}
