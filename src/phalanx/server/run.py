"""run: the application on a socket, from the first byte to an orderly end."""

from __future__ import annotations

import asyncio
import gc
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvicorn

from phalanx.engine.opened_model import OpenedModel
from phalanx.server.app import build_app
from phalanx.server.edge import RequestRecord
from phalanx.server.engine_client import EngineStartError
from phalanx.server.errors import ApiError
from phalanx.server.request_log import RequestLog
from phalanx.server.service import Service
from phalanx.server.settings import ServerSettings

_KEEP_ALIVE_SECONDS = 30
_LAST_SECONDS = 5


def listen(host: str, port: int) -> socket.socket:
    """A socket that takes connections; port 0 picks one.

    Raises:
        OSError: the address is in use, not of this machine, or none.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048)
    except (OSError, UnicodeError) as error:
        # Python repeats the address behind the reason.
        reason = str(getattr(error, "strerror", None) or error).partition(" (while")[0]
        raise OSError(f"cannot listen on {host}:{port}: {reason}") from None


def listen_unix(path: Path) -> socket.socket:
    """A Unix socket that takes connections; a stale one of a server that has ended is replaced.

    Raises:
        OSError: there is something else, or a server that runs, or nothing can be made there.
    """
    listener = socket.socket(socket.AF_UNIX)
    try:
        if path.is_socket():
            with socket.socket(socket.AF_UNIX) as probe:
                runs = probe.connect_ex(str(path)) == 0
            if runs:
                raise OSError("a server runs there")
            path.unlink()
        elif path.exists():
            raise OSError("something else is there")
        listener.bind(str(path))
    except OSError as error:
        listener.close()
        raise OSError(f"cannot listen on the Unix socket {path}: {error.strerror or error}") from None
    listener.listen(2048)
    return listener


def run(settings: ServerSettings, listener: socket.socket, on_ready: Callable[[Service], None]) -> None:
    """Serves until SIGTERM, SIGINT or SIGHUP; returns once running requests have ended and the engine's process too.

    Args:
        listener: takes connections from the first moment; while the model loads, requests get 503.
        on_ready: told once the model is loaded.

    Raises:
        EngineStartError: the engine could not be built. What opening the model raises.
    """
    service = Service(settings, OpenedModel(settings.model))
    listeners: list[Callable[[RequestRecord], None]] = [RequestLog(settings)]
    if settings.otlp_endpoint is not None:
        from phalanx.server.tracing import Tracing

        tracing = Tracing(settings.otlp_endpoint, service.name)
        listeners.append(tracing)
    server = _Server(service, build_app(service, listeners))
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        runner.run(server.run(listener, on_ready))
    if settings.otlp_endpoint is not None:
        tracing.close()


class _Server(uvicorn.Server):
    """uvicorn with an end of its own: the first signal drains, the second one does not wait."""

    def __init__(self, service: Service, app: object) -> None:
        self._service = service
        self._loop: asyncio.AbstractEventLoop
        self._drain: asyncio.Task[None] | None = None
        super().__init__(
            uvicorn.Config(
                app,  # type: ignore[arg-type]
                lifespan="off",
                http=_connection_class(),
                ws="none",
                access_log=False,
                log_config=None,
                server_header=False,
                timeout_keep_alive=_KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=_LAST_SECONDS,
                h11_max_incomplete_event_size=64 * 1024,
            )
        )

    async def run(self, listener: socket.socket, on_ready: Callable[[Service], None]) -> None:  # type: ignore[override]
        self._loop = asyncio.get_running_loop()
        starting = asyncio.create_task(self._start_engine(on_ready))
        try:
            await self.serve(sockets=[listener])
            if starting.done():
                starting.result()
        finally:
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
            await self._service.engine.close()
            self._service.close()
            gc.unfreeze()

    async def _start_engine(self, on_ready: Callable[[Service], None]) -> None:
        try:
            await self._service.engine.start()
        except EngineStartError:
            self.should_exit = True
            raise
        # What is there now stays: without it, full collections are cheap, and come before their garbage is large.
        gc.collect()
        gc.freeze()
        on_ready(self._service)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals end the server in order; uvicorn's own way would let the process die by them in the end."""
        handlers = {signal.SIGTERM: self._on_signal, signal.SIGINT: self._on_signal}
        # A terminal that closes ends what runs in it, but for what was started to outlive it (nohup).
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            # The shell may send it, and the kernel too: that nobody wants to wait is not said by it.
            handlers[signal.SIGHUP] = self._begin_drain
        for kind, handler in handlers.items():
            self._loop.add_signal_handler(kind, handler)
        try:
            yield
        finally:
            for kind in handlers:
                self._loop.remove_signal_handler(kind)

    def _on_signal(self) -> None:
        if self._drain is None:
            self._begin_drain()
        else:
            self._give_up()

    def _begin_drain(self) -> None:
        if self._drain is None:
            self._service.draining = True
            self._drain = self._loop.create_task(self._drained())

    async def _drained(self) -> None:
        """Waits for what runs, with new requests refused; what is left in the end is told so."""
        deadline = self._loop.time() + self._service.settings.drain_timeout
        while self._service.open_answers and self._loop.time() < deadline and not self.should_exit:
            await asyncio.sleep(0.05)
        self._give_up()

    def _give_up(self) -> None:
        self._service.engine.give_up(ApiError(503, "the server is shutting down", code="draining"))
        self.should_exit = True


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    if sys.platform == "win32":
        return None
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


def _connection_class() -> Any:
    """With bounds of our own; uvicorn's slower one, which bounds the heads of requests too, without httptools."""
    try:
        from phalanx.server.connection import Connection
    except ImportError:
        return "h11"
    return Connection
