"""From a model's text to calls of functions, one class a format. All work on text as it comes.

A parser takes text only when what it means is certain, and that depends on the text before it alone: so it does not
matter how the text was cut. What looked like a call and is none comes out as the text that it is. White space between
text and calls, and between calls, belongs to neither.
"""

from __future__ import annotations

import re
import secrets
import string
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection

from phalanx.server.parsing.json_call import JsonCall, JsonValue, Progress
from phalanx.server.parsing.pieces import Content, Piece, ToolArguments, ToolCall

_ALPHANUMERIC = string.ascii_letters + string.digits


def call_id() -> str:
    """A new id of a call: nine letters and digits, all that Mistral's templates take; the others take any."""
    return "".join(secrets.choice(_ALPHANUMERIC) for _ in range(9))


def held_back(text: str, mark: str) -> int:
    """Length of the longest end of a text with which the mark may have begun."""
    return next((size for size in range(min(len(text), len(mark) - 1), 0, -1) if mark.startswith(text[-size:])), 0)


class ToolParser(ABC):
    """Reads calls out of a stream of text.

    Args:
        names: functions that may be called; none given: any.
    """

    def __init__(self, names: Collection[str] = ()) -> None:
        self._names = frozenset(names)
        self._pieces: list[Piece] = []
        self._text = ""
        self._space = ""
        self._calls = 0
        self._call: JsonCall | None = None
        self._reported: JsonCall | None = None
        # What has been taken since a call seemed to begin: text again, if it is none.
        self._opening = ""
        self._state: Callable[[bool], bool] = self.begin()

    def push(self, text: str, closed: bool = False) -> list[Piece]:
        """Takes text; returns what is certain. ``closed``: no more will come."""
        self._text += text
        while self._state(closed):
            pass
        if closed and not self._calls:
            self._emit(Content(self._space))
        pieces, self._pieces = self._pieces, []
        return pieces

    # A state takes text of ``self._text``, or turns into another one; it answers whether to go on at once.

    @abstractmethod
    def begin(self) -> Callable[[bool], bool]:
        """The first state."""

    @abstractmethod
    def after_call(self, closed: bool) -> bool:
        """State behind the JSON object of a call."""

    def only_text(self, closed: bool) -> bool:
        """State: no calls any more."""
        self.take_content(len(self._text))
        return False

    def up_to(self, mark: str, closed: bool) -> bool:
        """Takes content up to a mark and the mark itself; whether it has come."""
        place = self._text.find(mark)
        if place < 0:
            self.take_content(len(self._text) - (0 if closed else held_back(self._text, mark)))
            return False
        self.take_content(place)
        self._text = self._text[len(mark) :]
        self._opening = mark
        return True

    def in_call(self, closed: bool) -> bool:
        """State: in the JSON object of a call."""
        call = self._call or JsonCall(self.accepts)
        self._call = call
        for place, char in enumerate(self._text):
            progress = call.feed(char)
            if progress is Progress.MORE:
                continue
            self._text = self._text[place + (progress is Progress.DONE) :]
            self._report(call)
            self._call = None
            if call.started:
                self._state = self.after_call
            else:
                self.no_call(call.raw)
            return True
        self._text = ""
        self._report(call)
        if closed and not call.started:
            self._call = None
            self.no_call(call.raw)
        return False

    def accepts(self, name: str) -> bool:
        return bool(name) and (not self._names or name in self._names)

    def no_call(self, taken: str) -> None:
        """It was none: what was taken is text, and the reading starts anew behind it."""
        self._content(self._opening + taken)
        self._opening = ""
        self._state = self.begin()

    def start(self, name: str) -> None:
        """A call begins."""
        self._space = self._opening = ""
        self._emit(ToolCall(self._calls, call_id(), name))
        self._calls += 1

    def arguments(self, text: str) -> None:
        """The next part of the arguments of the last call."""
        self._emit(ToolArguments(self._calls - 1, text))

    def take_content(self, count: int) -> None:
        self._content(self._text[:count])
        self._text = self._text[count:]

    def skip_space(self) -> None:
        self._text = self._text.lstrip()

    def _content(self, text: str) -> None:
        text = self._space + text
        body = text.rstrip()
        self._space = text[len(body) :]
        self._emit(Content(body))

    def _report(self, call: JsonCall) -> None:
        if call.name is None:
            return
        if call is not self._reported:
            self._reported = call
            self.start(call.name)
        self.arguments(call.take_arguments())

    def _emit(self, piece: Piece) -> None:
        if isinstance(piece, ToolCall) or piece.text:
            self._pieces.append(piece)


class HermesParser(ToolParser):
    """``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, any number of them, text around them.

    As in the model cards of NousResearch/Hermes-2-Pro-Llama-3-8B ("Prompt Format for Function Calling") and
    Qwen/Qwen2.5-7B-Instruct, and the chat templates of these, of Qwen3 and of SmolLM3.
    """

    OPEN, CLOSE = "<tool_call>", "</tool_call>"

    def begin(self) -> Callable[[bool], bool]:
        return self._in_text

    def _in_text(self, closed: bool) -> bool:
        if not self.up_to(self.OPEN, closed):
            return False
        self._state = self.in_call
        return True

    def after_call(self, closed: bool) -> bool:
        self.skip_space()
        if self.CLOSE.startswith(self._text) and self._text != self.CLOSE and not closed:
            return False
        self._text = self._text.removeprefix(self.CLOSE)
        self._state = self._in_text
        return True


class Llama3Parser(ToolParser):
    """The whole answer is ``{"name": ..., "parameters": {...}}``, after ``<|python_tag|>`` or without it; several with
    semicolons or white space between them.

    As in "JSON based tool calling" of Meta's model card and prompt formats for Llama 3.1 (and 3.2, 3.3), and the chat
    template of meta-llama/Llama-3.1-8B-Instruct. An answer that does not begin so is text.
    """

    TAG = "<|python_tag|>"

    def begin(self) -> Callable[[bool], bool]:
        # What follows text, a failed call included, is text.
        return self._at_start if not self._calls and not self._seen else self.only_text

    _seen = False

    def _at_start(self, closed: bool) -> bool:
        self._seen = True
        body = self._text.lstrip()
        if not body or (self.TAG.startswith(body) and body != self.TAG):
            if not closed:
                return False
            self._state = self.only_text
            return True
        behind = body.removeprefix(self.TAG)
        self._opening = self._text[: len(self._text) - len(behind)]
        self._text = behind
        self._state = self.in_call
        return True

    def after_call(self, closed: bool) -> bool:
        body = self._text.lstrip()
        if body[:1] not in ("", ";", "{"):
            self._state = self.only_text
            return True
        behind = body.removeprefix(";").lstrip()
        if behind:
            self._opening = self._text[: len(self._text) - len(behind)]
            self._text = behind
            self._state = self.in_call
        elif closed:
            self._text = ""
        return bool(behind)


class MistralParser(ToolParser):
    """``[TOOL_CALLS]`` and a list of ``{"name": ..., "arguments": {...}}``; or, from tokenizer version 11 on, a call
    each: ``[TOOL_CALLS]name[ARGS]{...}``, with ``[CALL_ID]id`` behind the name in version 11.

    As in the chat templates of mistralai/Mistral-7B-Instruct-v0.3 and mistralai/Mistral-Small-3.2-24B-Instruct-2506,
    and the tokenizers of mistral-common. The control token ``[ARGS]`` may be missing.
    """

    OPEN = "[TOOL_CALLS]"
    _NAME = re.compile(r"\s*([A-Za-z0-9_.-]{1,64})(?:\[CALL_ID\][A-Za-z0-9]{0,64})?(?:\[ARGS\])?\s*(?=\{)")
    _BEGUN = re.compile(r"\s*[A-Za-z0-9_.-]{0,64}(?:\[[A-Z_]{0,7}\]?[A-Za-z0-9]{0,64}(?:\[[A-Z]{0,4}\]?)?)?\s*")
    _object: JsonValue | None = None

    def begin(self) -> Callable[[bool], bool]:
        return self._in_text

    def _in_text(self, closed: bool) -> bool:
        if not self.up_to(self.OPEN, closed):
            return False
        self._state = self._list_or_name
        return True

    def _list_or_name(self, closed: bool) -> bool:
        body = self._text.lstrip()
        if not body and not closed:
            return False
        if body.startswith("["):
            self._opening += self._text[: len(self._text) - len(body) + 1]
            self._text = body[1:]
            self._state = self.in_call
            return True
        named = self._NAME.match(self._text)
        if named is not None and self.accepts(named[1]):
            self._text = self._text[named.end() :]
            self.start(named[1])
            self._object = JsonValue()
            self._state = self._in_object
            return True
        if named is None and not closed and self._BEGUN.fullmatch(self._text):
            return False
        self.no_call("")
        return True

    def _in_object(self, closed: bool) -> bool:
        if self._object is None:
            raise RuntimeError("no arguments are being read")
        for place, char in enumerate(self._text):
            if self._object.feed(char):
                self.arguments(self._text[: place + 1])
                self._text = self._text[place + 1 :]
                self._state = self._in_text
                return True
        self.arguments(self._text)
        self._text = ""
        return False

    def after_call(self, closed: bool) -> bool:
        body = self._text.lstrip()
        if not body:
            self._text = "" if closed else self._text
            return False
        if body[0] == ",":
            self._opening, self._text = body[0], body[1:]
            self._state = self.in_call
            return True
        self._text = body.removeprefix("]")
        self._state = self._in_text
        return True
