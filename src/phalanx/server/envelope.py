"""Envelope: what stands around the choices of an answer and of each chunk of it."""

from __future__ import annotations

import time
from typing import Any

from phalanx.server.errors import encode
from phalanx.server.sse import event


class Envelope:
    """Made once a request, so that a chunk costs the encoding of its choice alone.

    Args:
        prefix: of the id: "cmpl", "chatcmpl".
        request_id: the rest of it.
        kind: the field ``object``.
        include_usage: chunks have a usage, null until the last.
    """

    def __init__(self, prefix: str, request_id: str, kind: str, model: str, include_usage: bool = False) -> None:
        self._fields = {
            "id": f"{prefix}-{request_id}",
            "object": kind,
            "created": int(time.time()),
            "model": model,
        }
        self._head = encode(self._fields)[:-1] + b',"choices":['
        self._tail = b'],"usage":null}' if include_usage else b"]}"

    def whole(self, choices: list[dict[str, Any]], usage: dict[str, Any]) -> bytes:
        """An answer."""
        return encode({**self._fields, "choices": choices, "usage": usage})

    def chunk(self, choice: dict[str, Any]) -> bytes:
        """A chunk, as an event."""
        return event(self._head + encode(choice) + self._tail)

    def usage_chunk(self, usage: dict[str, Any]) -> bytes:
        """The chunk behind the last choice, as an event."""
        return event(encode({**self._fields, "choices": [], "usage": usage}))
