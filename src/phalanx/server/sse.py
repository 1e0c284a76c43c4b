"""Server-sent events, and seeing that a client has gone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from phalanx.server.errors import ClientGone

DONE = b"data: [DONE]\n\n"
Result = TypeVar("Result")


def event(data: bytes, name: str = "") -> bytes:
    """One event, with a name where it has one."""
    return (f"event: {name}\n".encode() if name else b"") + b"data: " + data + b"\n\n"


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """What ``work`` returns; it is cancelled when the client closes its connection.

    Raises:
        ClientGone: it did.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        await _cancel(task, gone)


class EventStream(Response):
    """Sends events as they come; leaves the generator when the client has gone.

    Args:
        first: has been waited for, so that what goes wrong before it has a status of its own.
    """

    media_type = "text/event-stream"

    def __init__(self, first: bytes, rest: AsyncGenerator[bytes, None]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._first = first
        self._rest = rest

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # The answer has begun: there is no other one to give.
        with suppress(ClientGone):
            await unless_gone(receive, self._send(send))

    async def _send(self, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": self._first, "more_body": True})
            async for piece in self._rest:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            await self._rest.aclose()


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancel(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        if not task.done():
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
