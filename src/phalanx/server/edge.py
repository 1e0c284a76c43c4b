"""Edge: what every HTTP request passes: its id, its key, the size of its body, its line in the log, its errors."""

from __future__ import annotations

import hmac
import logging
import re
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from phalanx.server.errors import ApiError, ClientGone
from phalanx.server.settings import ServerSettings

log = logging.getLogger("phalanx.server")

_GIVEN_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
OPEN_PATHS = frozenset({"/", "/health", "/ready"})
"""Answered without a key: what a load balancer asks, and the page, which asks its user for one."""
RECORD = "phalanx.record"


@dataclass
class RequestRecord:
    """What is known of an HTTP request for the log and for traces. Times are in seconds since it came."""

    request_id: str
    method: str
    path: str
    began: float = field(default_factory=time.monotonic)
    began_at: float = field(default_factory=time.time)
    status: int = 0
    seconds: float = 0.0
    user: str | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    queue_seconds: float | None = None
    first_token_seconds: float | None = None
    finish_reasons: list[str] = field(default_factory=list)
    error: str | None = None
    prompts: list[Any] = field(default_factory=list)
    answers: list[str] = field(default_factory=list)


class Edge:
    """ASGI middleware, outermost but for CORS.

    Args:
        on_end: told of each request once it is answered.
    """

    def __init__(self, app: ASGIApp, settings: ServerSettings, on_end: Callable[[RequestRecord], None]) -> None:
        self.app = app
        self.max_body_bytes = settings.max_body_bytes
        self._keys = [key.strip().encode() for key in settings.api_keys]
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        record = RequestRecord(
            request_id=given if _GIVEN_ID.fullmatch(given) else f"req-{secrets.token_hex(12)}",
            method=scope["method"],
            path=scope["path"],
        )
        scope[RECORD] = record

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                MutableHeaders(scope=message)["X-Request-Id"] = record.request_id
            await send(message)

        try:
            try:
                self._check_key(scope, headers)
                await self.app(scope, self._limited(headers, receive), answer)
            except ApiError as error:
                record.error = error.message
                await error.response()(scope, receive, answer)
        except ClientGone:
            pass
        except Exception as error:
            log.exception("request %s failed", record.request_id)
            record.error = type(error).__name__
            if record.status:
                # The answer has begun: all that is left is to break it off.
                raise
            await ApiError(
                500, f"an internal error; the server's log has more under request id {record.request_id}"
            ).response()(scope, receive, answer)
        finally:
            # A stream whose client left before its first byte sends none.
            record.status = record.status or 499
            record.seconds = time.monotonic() - record.began
            self._on_end(record)

    def _check_key(self, scope: Scope, headers: Headers) -> None:
        if not self._keys or scope["path"] in OPEN_PATHS:
            return
        kind, _, token = headers.get("authorization", "").partition(" ")
        given = token.strip().encode("latin-1") if kind.lower() == "bearer" else b""
        # Every key is compared in full: the time says nothing about which is near.
        right = [hmac.compare_digest(given, key) for key in self._keys]
        if not any(right):
            raise ApiError(
                401,
                "a valid API key is needed: send it as 'Authorization: Bearer KEY'",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )

    def _limited(self, headers: Headers, receive: Receive) -> Receive:
        limit = self.max_body_bytes
        length = headers.get("content-length", "")
        if length.isdecimal() and int(length) > limit:
            raise _too_large(limit)
        size = 0

        async def read() -> Message:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > limit:
                raise _too_large(limit)
            return message

        return read


def _too_large(limit: int) -> ApiError:
    # What is left of the body is not read: the connection cannot go on.
    return ApiError(
        413, f"the request body is longer than {limit} bytes", code="body_too_large", headers={"Connection": "close"}
    )
