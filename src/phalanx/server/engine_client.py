"""EngineClient: the HTTP side of an engine. Starts its process, sends requests, hears answers, sees it die."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from enum import Enum
from typing import Any

from phalanx.engine.pooling import Pooling
from phalanx.engine.statistics import EngineStatistics, total
from phalanx.server.engine_messages import (
    Abort,
    Fault,
    FrameReader,
    Outputs,
    Piece,
    Ready,
    Refused,
    Shutdown,
    Start,
    StartFailed,
    Submit,
    ToEngine,
    frame,
    from_engine_decoder,
)

log = logging.getLogger("phalanx.server")

_POLL_SECONDS = 1.0
_CLOSE_SECONDS = 10.0
_FIRST_DELAY, _LONGEST_DELAY = 0.5, 30.0
_STEADY_SECONDS = 60.0


class EngineState(Enum):
    """Where an engine is in its life."""

    STARTING = "starting"
    READY = "ready"
    DEAD = "dead"
    CLOSED = "closed"


class EngineDead(RuntimeError):
    """The engine has ended; requests that ran on it are lost."""


class EngineStartError(RuntimeError):
    """The engine could not be built.

    Attributes:
        bad_input: by what was asked for, not by an accident.
    """

    def __init__(self, message: str, bad_input: bool) -> None:
        super().__init__(message)
        self.bad_input = bad_input


class Mailbox:
    """Where the pieces of one HTTP request's prompts arrive. Whoever waits gets all that have come meanwhile."""

    def __init__(self) -> None:
        self._pieces: list[Piece] = []
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    def put(self, piece: Piece) -> None:
        self._pieces.append(piece)
        self._wake()

    def fail(self, error: Exception) -> None:
        """Whoever waits, now or next, gets this error once what has come before it is read."""
        if self._error is None:
            self._error = error
            self._wake()

    async def get(self) -> list[Piece]:
        """The pieces that have come, at least one.

        Raises:
            what ``fail`` was given.
        """
        while not self._pieces:
            if self._error is not None:
                raise self._error
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        pieces, self._pieces = self._pieces, []
        return pieces

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class EngineClient:
    """One engine in a process of its own.

    Args:
        model: what another process can open: a folder, a file, a hub id, "smollm2".
        settings: of EngineConfig.
        restart: start it again when it has died, after 0.5 s, then twice as long each time up to 30 s.
        environment: added to this process's own for it.
        numbers: names of requests; engines that are used together share one.
        name: which of several it is.
        on_end: told the name when it has died.

    Attributes:
        ready: what the engine said of itself when it was ready; the last one's while it is started again.
        stats: the latest statistics, with what its processes before have counted.
        restarts: how many times it was started again.
    """

    def __init__(
        self,
        model: str,
        settings: dict[str, Any],
        restart: bool = False,
        environment: Mapping[str, str] | None = None,
        numbers: Iterator[int] | None = None,
        name: int = 0,
        on_end: Callable[[int], None] = lambda name: None,
    ) -> None:
        self.model = model
        self.settings = settings
        self.restart = restart
        self.state = EngineState.STARTING
        self.ready: Ready | None = None
        self.stats: EngineStatistics | None = None
        self.restarts = 0
        self.reason = ""
        self._mailboxes: dict[int, Mailbox] = {}
        self._environment = dict(environment or {})
        self._numbers = numbers if numbers is not None else itertools.count(1)
        self._name = name
        self._on_end = on_end
        self._past: EngineStatistics | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._transport: asyncio.WriteTransport | None = None
        self._supervisor: asyncio.Task[None] | None = None
        # Of the process that runs now: whether it is ready, and, once it has ended, its own words about why.
        self._started: asyncio.Future[None]
        self._ended: asyncio.Future[str]

    @property
    def pid(self) -> int | None:
        """Of the engine's process, while there is one."""
        return None if self._process is None else self._process.pid

    @property
    def open_requests(self) -> int:
        """Prompts that were submitted and have not ended."""
        return len(self._mailboxes)

    # -- its life

    async def start(self) -> None:
        """Starts the process; returns when the engine is ready.

        Raises:
            EngineStartError: it could not be built.
        """
        await self._launch()
        self._supervisor = asyncio.create_task(self._supervise())

    async def close(self) -> None:
        """Ends the engine: told to, then, after 10 s, killed. Requests that still run get EngineDead."""
        if self._supervisor is not None:
            self._supervisor.cancel()
            with suppress(asyncio.CancelledError):
                await self._supervisor
        self.state = EngineState.CLOSED
        self._send(Shutdown())
        self._fail_all("the server has shut down")
        await self._reap(_CLOSE_SECONDS)

    async def _launch(self) -> None:
        ours, theirs = socket.socketpair()
        try:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-P", "-m", "phalanx.distributed.child"),
                    *("phalanx.server.engine_process", str(theirs.fileno())),
                ],
                env={
                    **os.environ,
                    **self._environment,
                    "PYTHONPATH": os.pathsep.join(entry or os.getcwd() for entry in sys.path),
                },
                # Its end is the engine's sign that this process has ended.
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                # A Ctrl-C in the terminal is for this process, which then ends the engine in order.
                start_new_session=True,
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        ours.setblocking(False)
        loop = asyncio.get_running_loop()
        self._started, self._ended = loop.create_future(), loop.create_future()
        self._transport, _ = await loop.create_unix_connection(lambda: _Connection(self), sock=ours)
        self._send(Start(self.model, self.settings))
        try:
            await self._started
        except BaseException:
            await self._reap(0.0)
            raise

    async def _supervise(self) -> None:
        """Sees the engine end, tells all who wait, and starts it again where that was asked for."""
        delay = _FIRST_DELAY
        while True:
            since = time.monotonic()
            words = await self._last_words()
            self.state = EngineState.DEAD
            code = await self._reap(2.0)
            self.reason = words or _obituary(code)
            log.error("engine %d has ended: %s", self._name, self.reason)
            if self.stats is not None:
                self.stats = self._past = self.stats.ended()
            self._fail_all(self.reason)
            self._on_end(self._name)
            if not self.restart:
                return
            delay = _FIRST_DELAY if time.monotonic() - since > _STEADY_SECONDS else delay
            while self.state is EngineState.DEAD:
                log.warning("starting engine %d again in %.1f s", self._name, delay)
                await asyncio.sleep(delay)
                delay = min(2 * delay, _LONGEST_DELAY)
                try:
                    await self._launch()
                except EngineStartError as error:
                    log.error("engine %d could not be started again: %s", self._name, error)
            self.restarts += 1

    async def _last_words(self) -> str:
        """Returns when the engine has ended: it tells of a fault, its socket is closed, or its process is gone."""
        while self._process is not None and self._process.poll() is None:
            done, _ = await asyncio.wait({self._ended}, timeout=_POLL_SECONDS)
            if done:
                break
        return self._ended.result() if self._ended.done() else ""

    async def _reap(self, grace: float) -> int:
        """Waits for the process to end, kills it after ``grace`` s, and returns its exit code."""
        process, self._process = self._process, None
        if process is None:
            return 0
        try:
            await asyncio.to_thread(process.wait, grace)
        except subprocess.TimeoutExpired:
            process.kill()
            await asyncio.to_thread(process.wait)
        if process.stdin is not None:
            process.stdin.close()
        if self._transport is not None:
            self._transport.abort()
            self._transport = None
        return process.returncode

    def _fail_all(self, reason: str) -> None:
        mailboxes, self._mailboxes = self._mailboxes, {}
        for mailbox in mailboxes.values():
            mailbox.fail(EngineDead(f"the engine has ended: {reason}"))

    # -- requests

    def submit(
        self,
        mailbox: Mailbox,
        token_ids: list[int],
        params: dict[str, Any],
        cache_salt: str,
        streamed: bool,
        pooling: Pooling | None = None,
    ) -> int:
        """Sends a prompt; its pieces come into the mailbox under the number that is returned.

        Raises:
            EngineDead: there is no engine now.
        """
        if self.state is not EngineState.READY:
            reason = "is starting" if self.state is EngineState.STARTING else f"has ended: {self.reason}"
            raise EngineDead(f"the engine {reason}")
        number = next(self._numbers)
        self._mailboxes[number] = mailbox
        self._send(Submit(number, token_ids, params, cache_salt, streamed, pooling))
        return number

    def forget(self, number: int, aborted: bool) -> None:
        """Nobody waits for this request any more; with ``aborted``, it has not ended."""
        if self._mailboxes.pop(number, None) is not None and aborted:
            self._send(Abort(number))

    def give_up(self, error: Exception) -> None:
        """Ends everything that runs with this error."""
        for number, mailbox in list(self._mailboxes.items()):
            self.forget(number, aborted=True)
            mailbox.fail(error)

    def _send(self, message: ToEngine) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(frame(message))

    # -- what the engine says

    def hear(self, payload: bytes) -> None:
        """One message of the engine."""
        message = from_engine_decoder.decode(payload)
        if isinstance(message, Outputs):
            if message.stats is not None:
                self.stats = self._with_past(message.stats)
            for piece in message.pieces:
                mailbox = self._mailboxes.get(piece.number)
                if mailbox is not None:
                    mailbox.put(piece)
        elif isinstance(message, Refused):
            mailbox = self._mailboxes.pop(message.number, None)
            if mailbox is not None:
                mailbox.fail(ValueError(message.message))
        elif isinstance(message, Ready):
            self.ready, self.stats, self.state = message, self._with_past(message.stats), EngineState.READY
            self._started.set_result(None)
        elif isinstance(message, StartFailed):
            self._started.set_exception(EngineStartError(message.message, message.bad_input))
        elif isinstance(message, Fault):
            self._ended.set_result(message.message)

    def _with_past(self, stats: EngineStatistics) -> EngineStatistics:
        # Counters must not fall when an engine starts anew.
        return stats if self._past is None else total([self._past, stats])

    def hear_end(self) -> None:
        """The socket is closed: the engine's process has ended, or is about to."""
        if not self._started.done():
            self._started.set_exception(EngineStartError("its process ended while it started", bad_input=False))
        if not self._ended.done():
            self._ended.set_result("")


def _obituary(code: int) -> str:
    if code < 0:
        return f"its process was killed by {signal.Signals(-code).name}"
    return f"its process ended with exit code {code}"


class _Connection(asyncio.Protocol):
    """Hands frames to the client that it belongs to."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self._frames = FrameReader()

    def data_received(self, data: bytes) -> None:
        for payload in self._frames.feed(data):
            self._client.hear(payload)

    def connection_lost(self, error: Exception | None) -> None:
        self._client.hear_end()
