"""One line in the log for each request."""

from __future__ import annotations

import sys
import time
from contextlib import suppress
from typing import Any, TextIO

from phalanx.server.edge import RequestRecord
from phalanx.server.errors import encode
from phalanx.server.settings import ServerSettings

QUIET = frozenset({"/health", "/ready", "/metrics"})
"""Asked every few seconds by machines: logged only when they fail."""


class RequestLog:
    """Writes the lines.

    Args:
        settings: the format, and whether prompts and answers are part of a line.
        out: where to; default: standard error.
    """

    def __init__(self, settings: ServerSettings, out: TextIO | None = None) -> None:
        self._json = settings.log_format == "json"
        self._out = out if out is not None else sys.stderr

    def __call__(self, record: RequestRecord) -> None:
        """Writes the line of a request that has been answered."""
        if record.path in QUIET and record.status < 400:
            return
        fields = _fields(record)
        line = encode(fields).decode() if self._json else _plain(fields)
        # Whoever read the log may have ended, or its disk be full: the request has been answered all the same.
        with suppress(OSError):
            print(line, file=self._out, flush=True)


def _fields(record: RequestRecord) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.began_at))
        + f".{record.began_at % 1:.3f}"[2:]
        + "Z",
        "request_id": record.request_id,
        "method": record.method,
        "path": record.path,
        "status": record.status,
        "seconds": round(record.seconds, 4),
    }
    more = {
        "user": record.user,
        "prompt_tokens": record.prompt_tokens,
        "cached_tokens": record.cached_tokens,
        "completion_tokens": record.completion_tokens,
        "queue_seconds": _rounded(record.queue_seconds),
        "first_token_seconds": _rounded(record.first_token_seconds),
        "finish_reasons": record.finish_reasons,
        "error": record.error,
        "prompts": record.prompts,
        "answers": record.answers,
    }
    return fields | {name: value for name, value in more.items() if value not in (None, 0, [])}


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 4)


def _plain(fields: dict[str, Any]) -> str:
    """For people: the request, then name=value. Whatever came from a client is quoted, so that it stays on its line."""
    rest = {
        name: value for name, value in fields.items() if name not in ("time", "method", "path", "status", "seconds")
    }
    told = " ".join(
        f"{name}={value if isinstance(value, (int, float)) else repr(value)}" for name, value in rest.items()
    )
    path = fields["path"].encode("unicode_escape").decode()
    return f"{fields['time']} {fields['method']} {path} {fields['status']} {fields['seconds']:.3f}s {told}"
