"""From a model's text to what the API speaks of: content, reasoning, calls of functions; and the guides that force
calls."""

from phalanx.server.parsing.output import OutputParser, guess_formats, reasoning_formats, tool_formats
from phalanx.server.parsing.pieces import Content, Piece, Reasoning, ToolArguments, ToolCall, merged
from phalanx.server.parsing.tool_guides import tool_guide

__all__ = [
    "Content",
    "OutputParser",
    "Piece",
    "Reasoning",
    "ToolArguments",
    "ToolCall",
    "guess_formats",
    "merged",
    "reasoning_formats",
    "tool_formats",
    "tool_guide",
]
