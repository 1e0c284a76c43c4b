"""What a model's text turns out to be."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Content:
    """Text for the reader."""

    text: str


@dataclass(frozen=True)
class Reasoning:
    """Text of the model's thinking, without its marks."""

    text: str


@dataclass(frozen=True)
class ToolCall:
    """A call of a function begins. ``index`` counts an answer's calls from 0."""

    index: int
    id: str
    name: str


@dataclass(frozen=True)
class ToolArguments:
    """The next part of a call's arguments: parts, joined, are the JSON object as the model wrote it."""

    index: int
    text: str


Piece = Content | Reasoning | ToolCall | ToolArguments


def merged(pieces: list[Piece]) -> list[Piece]:
    """The same with neighbours of one kind (and call) joined, and nothing empty."""
    result: list[Piece] = []
    for piece in pieces:
        last = result[-1] if result else None
        if isinstance(piece, ToolCall):
            result.append(piece)
        elif not piece.text:
            continue
        elif isinstance(piece, ToolArguments) and isinstance(last, ToolArguments) and piece.index == last.index:
            result[-1] = ToolArguments(piece.index, last.text + piece.text)
        elif isinstance(piece, Content) and isinstance(last, Content):
            result[-1] = Content(last.text + piece.text)
        elif isinstance(piece, Reasoning) and isinstance(last, Reasoning):
            result[-1] = Reasoning(last.text + piece.text)
        else:
            result.append(piece)
    return result
