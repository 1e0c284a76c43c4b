"""JsonCall: reads one ``{"name": ..., "arguments": {...}}``, character by character."""

from __future__ import annotations

import enum
import json
from collections.abc import Callable

_SPACE = " \t\r\n"
_ARGUMENTS = ("arguments", "parameters")


class Progress(enum.Enum):
    """Where the reading of a value or a call is."""

    MORE = "more"
    DONE = "done"
    FAILED = "failed"


class JsonValue:
    """Finds the end of a JSON object, array or string. Brackets are counted, strings respected; no more is checked."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = self._escaped = False

    def feed(self, char: str) -> bool:
        """Takes the next character; whether it is the value's last."""
        if self._in_string:
            if self._escaped:
                self._escaped = False
            elif char == "\\":
                self._escaped = True
            elif char == '"':
                self._in_string = False
                return self._depth == 0
        elif char == '"':
            self._in_string = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
            return self._depth == 0
        return False


class JsonCall:
    """One call as it comes; the order of its members is free, and members that say nothing of the call are passed over.

    Attributes:
        name: the function's, once the call has started: its name is known, and its arguments begin.

    Args:
        accepts: whether there is a function of this name.
    """

    def __init__(self, accepts: Callable[[str], bool]) -> None:
        self.name: str | None = None
        self._raw: list[str] = []
        self._arguments: list[str] = []
        self._accepts = accepts
        self._known: str | None = None
        self._key = ""
        self._value = JsonValue()
        self._text: list[str] = []
        self._has_arguments = False
        self._state = self._open

    @property
    def started(self) -> bool:
        return self.name is not None

    @property
    def raw(self) -> str:
        """What was taken before the call started."""
        return "".join(self._raw)

    def feed(self, char: str) -> Progress:
        """Takes the next character. One that FAILED is not taken."""
        progress = self._state(char)
        if progress is not Progress.FAILED and not self.started:
            self._raw.append(char)
        return progress

    def take_arguments(self) -> str:
        """The arguments' text since this was last asked."""
        text = "".join(self._arguments)
        self._arguments.clear()
        return text

    def _open(self, char: str) -> Progress:
        if char == "{":
            self._state = self._member
        return Progress.MORE if char in _SPACE or char == "{" else Progress.FAILED

    def _member(self, char: str) -> Progress:
        if char in _SPACE:
            return Progress.MORE
        if char == "}":
            return self._end()
        if char != '"':
            return Progress.FAILED
        self._begin_value(char)
        self._state = self._in_key
        return Progress.MORE

    def _in_key(self, char: str) -> Progress:
        if self._feed_value(char):
            key = self._string()
            if key is None:
                return Progress.FAILED
            self._key = key
            self._state = self._colon
        return Progress.MORE

    def _colon(self, char: str) -> Progress:
        if char == ":":
            self._state = self._before_value
        return Progress.MORE if char in _SPACE or char == ":" else Progress.FAILED

    def _before_value(self, char: str) -> Progress:
        if char in _SPACE:
            return Progress.MORE
        if self._key in _ARGUMENTS and not self._has_arguments:
            if char != "{":
                return Progress.FAILED
            self._has_arguments = True
            self._begin_value(char)
            self._arguments.append(char)
            self._start()
            self._state = self._in_arguments
        elif char in '{["':
            self._begin_value(char)
            self._state = self._in_value
        elif char in ",}]:" or self._key == "name":
            return Progress.FAILED
        else:
            self._state = self._in_scalar
        return Progress.MORE

    def _in_arguments(self, char: str) -> Progress:
        self._arguments.append(char)
        if self._value.feed(char):
            self._state = self._after_value
        return Progress.MORE

    def _in_value(self, char: str) -> Progress:
        if not self._feed_value(char):
            return Progress.MORE
        if self._key == "name" and self._known is None:
            self._known = self._string()
            if self._known is None or not self._accepts(self._known):
                return Progress.FAILED
            if self._has_arguments:
                self._start()
        self._state = self._after_value
        return Progress.MORE

    def _in_scalar(self, char: str) -> Progress:
        if char in ",}" or char in _SPACE:
            self._state = self._after_value
            return self._after_value(char)
        return Progress.FAILED if char in '"{[]:' else Progress.MORE

    def _after_value(self, char: str) -> Progress:
        if char == ",":
            self._state = self._member
        elif char == "}":
            return self._end()
        return Progress.MORE if char in _SPACE or char == "," else Progress.FAILED

    def _end(self) -> Progress:
        if self._known is None:
            return Progress.FAILED
        if not self._has_arguments:
            self._arguments.append("{}")
        self._start()
        return Progress.DONE

    def _start(self) -> None:
        self.name = self._known

    def _begin_value(self, char: str) -> None:
        self._value = JsonValue()
        self._text.clear()
        self._feed_value(char)

    def _feed_value(self, char: str) -> bool:
        self._text.append(char)
        return self._value.feed(char)

    def _string(self) -> str | None:
        """What the value is that was read last, None unless it is a string."""
        try:
            value = json.loads("".join(self._text))
        except (ValueError, RecursionError):
            return None
        return value if isinstance(value, str) else None
