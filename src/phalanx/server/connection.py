"""Connection: uvicorn's own, with bounds on what a client may leave unfinished and unread."""

from __future__ import annotations

import asyncio
from http import HTTPStatus

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from phalanx.server.errors import ApiError, encode

_HEAD_BYTES = 64 * 1024
_HEAD_SECONDS = 60.0
_UNREAD_SECONDS = 60.0


class Connection(HttpToolsProtocol):
    """One client's. A request's head (its first line and headers) must end within 64 KiB and 60 s; a client that takes
    nothing of its answer for 60 s is left. What is no HTTP is answered in the shape of all errors."""

    head_seconds = _HEAD_SECONDS
    unread_seconds = _UNREAD_SECONDS

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._heads = 0
        self._in_head = True
        self._head_bytes = 0
        self._unread: asyncio.TimerHandle | None = None
        self._head: asyncio.TimerHandle | None = self.loop.call_later(self.head_seconds, self._leave)

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_timers()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        heads = self._heads
        super().data_received(data)
        if not self._in_head or self.transport.is_closing():
            return
        if self._head is None:
            self._head = self.loop.call_later(self.head_seconds, self._leave)
        # Counted from the second piece of a head on: what one read brings is bounded anyhow.
        self._head_bytes = self._head_bytes + len(data) if heads == self._heads else 0
        if self._head_bytes > _HEAD_BYTES:
            self._refuse(ApiError(431, f"the request's first line and headers are longer than {_HEAD_BYTES} bytes"))

    def on_message_begin(self) -> None:
        self._heads += 1
        self._in_head = True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._in_head = False
        if self._head is not None:
            self._head.cancel()
            self._head = None
        super().on_headers_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread = self.loop.call_later(self.unread_seconds, self._leave)

    def resume_writing(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        self._refuse(ApiError(400, "this is no HTTP request that can be read"))

    def _refuse(self, error: ApiError) -> None:
        body = encode(error.body())
        head = f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\ncontent-type: application/json\r\n"
        self.transport.write(f"{head}content-length: {len(body)}\r\nconnection: close\r\n\r\n".encode() + body)
        self.transport.close()

    def _leave(self) -> None:
        # Not close(), which would wait for what the client does not read.
        self.transport.abort()

    def _end_timers(self) -> None:
        for timer in (self._head, self._unread):
            if timer is not None:
                timer.cancel()
        self._head = self._unread = None
