"""ChatOutput: the text of one answer as OpenAI's messages and deltas, with reasoning and calls of functions apart."""

from __future__ import annotations

from typing import Any

from phalanx.server.parsing import Content, OutputParser, Piece, Reasoning, ToolArguments, ToolCall


class ChatOutput:
    """One answer.

    Args:
        parser: None where the whole text is content.
        parallel: whether an answer may have more than one call; further ones are left out otherwise.
    """

    def __init__(self, parser: OutputParser | None, parallel: bool = True) -> None:
        self._parser = parser
        self._parallel = parallel
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[dict[str, Any]] = []

    def push(self, text: str, ended: bool) -> list[dict[str, Any]]:
        """The deltas that more text gives."""
        if self._parser is None:
            pieces: list[Piece] = [Content(text)] if text else []
        else:
            pieces = self._parser.push(text) if text else []
            pieces += self._parser.close() if ended else []
        return [delta for piece in pieces if (delta := self._delta(piece)) is not None]

    def _delta(self, piece: Piece) -> dict[str, Any] | None:
        if isinstance(piece, Content):
            self._content.append(piece.text)
            return {"content": piece.text}
        if isinstance(piece, Reasoning):
            self._reasoning.append(piece.text)
            return {"reasoning_content": piece.text}
        if piece.index > 0 and not self._parallel:
            return None
        if isinstance(piece, ToolCall):
            function = {"name": piece.name, "arguments": ""}
            self._calls.append({"id": piece.id, "type": "function", "function": dict(function)})
            return {"tool_calls": [{"index": piece.index, "id": piece.id, "type": "function", "function": function}]}
        return self._arguments(piece)

    def _arguments(self, piece: ToolArguments) -> dict[str, Any]:
        self._calls[piece.index]["function"]["arguments"] += piece.text
        return {"tool_calls": [{"index": piece.index, "function": {"arguments": piece.text}}]}

    def message(self) -> dict[str, Any]:
        """The whole answer, once it has ended."""
        content = "".join(self._content)
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if self._reasoning:
            message["reasoning_content"] = "".join(self._reasoning)
        if self._calls:
            message |= {"content": content or None, "tool_calls": self._calls}
        return message

    def finish_reason(self, reason: str | None) -> str | None:
        """OpenAI's word for why the answer has ended."""
        return "tool_calls" if reason == "stop" and self._calls else reason
