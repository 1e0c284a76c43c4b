"""Application: the server for whoever brings the HTTP side, such as Ray Serve."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from phalanx.engine.opened_model import OpenedModel
from phalanx.server.app import build_app
from phalanx.server.request_log import RequestLog
from phalanx.server.service import Service
from phalanx.server.settings import ServerSettings


class Application:
    """An ASGI application. It needs the lifespan protocol: the model is loaded at its startup, which fails where that
    fails, and its engines end at its shutdown.

    Args:
        settings: what is served; the address and the end of connections are the host's.
    """

    def __init__(self, settings: ServerSettings) -> None:
        self._settings = settings
        self._service: Service | None = None
        self._app: ASGIApp | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
        elif self._app is None:
            raise RuntimeError("the application has not been started: run it with the ASGI lifespan protocol")
        else:
            await self._app(scope, receive, send)

    async def _live(self, receive: Receive, send: Send) -> None:
        while True:
            message: Message = await receive()
            if message["type"] == "lifespan.startup":
                try:
                    await self._start()
                except Exception as error:
                    await send({"type": "lifespan.startup.failed", "message": str(error)})
                    return
                await send({"type": "lifespan.startup.complete"})
            else:
                await self._end()
                await send({"type": "lifespan.shutdown.complete"})
                return

    async def _start(self) -> None:
        self._service = Service(self._settings, OpenedModel(self._settings.model))
        self._app = build_app(self._service, [RequestLog(self._settings)])
        await self._service.engine.start()

    async def _end(self) -> None:
        if self._service is not None:
            self._service.draining = True
            await self._service.engine.close()
            self._service.close()
