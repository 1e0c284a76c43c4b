"""OutputParser: a model's text, as it comes, as content, reasoning and calls of functions."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from phalanx.server.parsing.pieces import Content, Piece, Reasoning, merged
from phalanx.server.parsing.reasoning import MARKS, ReasoningSplit
from phalanx.server.parsing.tool_parsers import HermesParser, Llama3Parser, MistralParser, ToolParser

_TOOL_PARSERS: dict[str, type[ToolParser]] = {"hermes": HermesParser, "llama3": Llama3Parser, "mistral": MistralParser}
_CONTROL_TOKENS = {"llama3", "mistral"}
"""Formats with marks that are special tokens of their models' tokenizers."""


def tool_formats() -> tuple[str, ...]:
    """Names of the formats of calls that are known."""
    return tuple(_TOOL_PARSERS)


def reasoning_formats() -> tuple[str, ...]:
    """Names of the formats of thinking that are known."""
    return tuple(MARKS)


def guess_formats(chat_template: str | None, tokens: Collection[str] = ()) -> tuple[str | None, str | None]:
    """The formats of calls and of thinking that a model seems to use, by the marks in its chat template; those that a
    template leaves to the model are looked for among its ``tokens``."""
    template = chat_template or ""
    tool_format = None
    if "[TOOL_CALLS]" in template or "[TOOL_CALLS]" in tokens:
        tool_format = "mistral"
    elif "<tool_call>" in template and "<function=" not in template:
        tool_format = "hermes"
    elif "<|python_tag|>" in template:
        tool_format = "llama3"
    for name, (opening, closing) in MARKS.items():
        if opening in template or closing in template or (opening in tokens and closing in tokens):
            return tool_format, name
    return tool_format, None


class OutputParser:
    """Reads one answer.

    Args:
        tool_format, reasoning_format: of ``tool_formats()`` and ``reasoning_formats()``; None: the text has none.
        prompt_opens_reasoning: the prompt ends within the model's thinking.
        tools: as in the request, ``{"type": "function", "function": {"name": ...}}``. A call of a function that is not
            among them is text; without tools, any name is taken.

    Raises:
        ValueError: an unknown format.
    """

    def __init__(
        self,
        tool_format: str | None,
        reasoning_format: str | None,
        prompt_opens_reasoning: bool = False,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        for what, given, known in (
            ("tool", tool_format, _TOOL_PARSERS),
            ("reasoning", reasoning_format, MARKS),
        ):
            if given is not None and given not in known:
                raise ValueError(f"unknown {what} format {given!r}: expected one of {', '.join(known)}")
        names = [str(tool["function"]["name"]) for tool in tools]
        self._reasoning = ReasoningSplit(reasoning_format, prompt_opens_reasoning) if reasoning_format else None
        self._tools = _TOOL_PARSERS[tool_format](names) if tool_format else None
        self.needs_special_tokens = tool_format in _CONTROL_TOKENS or reasoning_format == "mistral"
        """Whether the text must be decoded with its special tokens."""

    def push(self, text: str) -> list[Piece]:
        """Takes the next part of the text, cut anywhere; returns what is certain. Pieces, joined, do not depend on how
        the text was cut."""
        return self._read(text, closed=False)

    def close(self) -> list[Piece]:
        """No more text will come: what was held back."""
        return self._read("", closed=True)

    def _read(self, text: str, closed: bool) -> list[Piece]:
        pieces: list[Piece] = []
        if self._reasoning is not None:
            thought, text = self._reasoning.push(text, closed)
            pieces.append(Reasoning(thought))
        if self._tools is not None:
            pieces += self._tools.push(text, closed)
        else:
            pieces.append(Content(text))
        return merged(pieces)
