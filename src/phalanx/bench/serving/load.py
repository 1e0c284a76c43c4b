"""The load: requests in an open or a closed loop, until there were enough of them, time is up, or it is stopped."""

from __future__ import annotations

import asyncio
import itertools
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, Any

import msgspec

from phalanx.bench.serving.arrivals import arrivals
from phalanx.bench.serving.client import Record, send

if TYPE_CHECKING:
    import aiohttp

_TICK = 0.01
# Servers close idle connections, many after 5 s: one that is about to be closed must not be used again.
_KEEP_ALIVE_SECONDS = 2
_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True)
class Load:
    """How requests are sent.

    Attributes:
        rate: requests a second, sent whatever the answers do (an open loop); None for a closed loop.
        burstiness: of an open loop, see `arrivals`.
        concurrency: of a closed loop, the requests that are always under way.
        requests: how many at most.
        duration: seconds in which requests are sent, at most; None for no limit. Those under way are waited for.
        warm_up: requests that are answered first, not measured.
        timeout: seconds in which an answer must be complete.
        seed: of the times.
    """

    rate: float | None = None
    burstiness: float = 1.0
    concurrency: int = 1
    requests: int | None = 100
    duration: float | None = None
    warm_up: int = 1
    timeout: float = 600.0
    seed: int = 0


@dataclass
class Measured:
    """What came of a load.

    Attributes:
        begun, ended: of ``time.perf_counter``.
        records: in the order of their ends.
        lags: seconds by which this process's event loop came back later than it should, sampled all the time.
        stopped: whether it was stopped before its end.
        under_way: requests that are not answered yet.
    """

    begun: float = 0.0
    ended: float = 0.0
    records: list[Record] = field(default_factory=list)
    lags: list[float] = field(default_factory=list)
    stopped: bool = False
    under_way: int = 0


Bodies = Iterator[dict[str, Any]]


class NothingAnswered(RuntimeError):
    """The server answers no request: there is nothing to measure."""


async def run(url: str, key: str, bodies: Bodies, load: Load, watch: Callable[[Measured], None]) -> Measured:
    """Warms up, then measures.

    Args:
        url: of the route.
        key: sent as a bearer token unless empty.
        watch: called a few times a second while it runs.

    Raises:
        NothingAnswered: no request of the warm-up was answered.
    """
    async with open_session(key, load.timeout) as session:
        with _interruptible() as stop:
            await _warm_up(session, url, list(itertools.islice(bodies, load.warm_up)))
            measured = Measured(begun=perf_counter())
            metronome = asyncio.create_task(_metronome(measured, watch))
            try:
                if load.rate is None:
                    await _closed(session, url, bodies, load, measured, stop)
                else:
                    await _open(session, url, bodies, load, load.rate, measured, stop)
            finally:
                metronome.cancel()
                measured.ended = perf_counter()
            watch(measured)
            return measured


@asynccontextmanager
async def open_session(key: str, timeout: float) -> AsyncIterator[aiohttp.ClientSession]:
    """Connections without a limit of their number, kept open between requests."""
    import aiohttp

    headers = {"Authorization": f"Bearer {key}"} if key else {}
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_SECONDS)
    limit = aiohttp.ClientTimeout(total=timeout)
    async with aiohttp.ClientSession(headers=headers, timeout=limit, connector=connector) as session:
        yield session


async def _warm_up(session: aiohttp.ClientSession, url: str, bodies: list[dict[str, Any]]) -> None:
    records = await asyncio.gather(*(send(session, url, _encode(body)) for body in bodies))
    if records and all(record.error for record in records):
        raise NothingAnswered(f"no request of the warm-up was answered: {records[0].error}: {records[0].message}")


async def _closed(
    session: aiohttp.ClientSession, url: str, bodies: Bodies, load: Load, measured: Measured, stop: asyncio.Event
) -> None:
    left = itertools.count() if load.requests is None else iter(range(load.requests))
    until = measured.begun + (load.duration or float("inf"))

    async def one_after_the_other() -> None:
        for _ in left:
            if perf_counter() >= until:
                return
            await _one(session, url, _encode(next(bodies)), measured)

    await _all_or_stop([asyncio.create_task(one_after_the_other()) for _ in range(load.concurrency)], measured, stop)


async def _open(
    session: aiohttp.ClientSession,
    url: str,
    bodies: Bodies,
    load: Load,
    rate: float,
    measured: Measured,
    stop: asyncio.Event,
) -> None:
    tasks: list[asyncio.Task[None]] = []

    async def dispatch() -> None:
        times = itertools.takewhile(
            lambda at: load.duration is None or at < load.duration,
            itertools.islice(arrivals(rate, load.burstiness, load.seed), load.requests),
        )
        for at in times:
            # Made before its time, so that making it does not delay it.
            body, due = _encode(next(bodies)), measured.begun + at
            await asyncio.sleep(due - perf_counter())
            tasks.append(asyncio.create_task(_one(session, url, body, measured, due)))

    await _all_or_stop([asyncio.create_task(dispatch())], measured, stop)
    await _all_or_stop(tasks, measured, stop)


async def _one(
    session: aiohttp.ClientSession, url: str, body: bytes, measured: Measured, due: float | None = None
) -> None:
    late = 0.0 if due is None else max(0.0, perf_counter() - due)
    sent = perf_counter()
    measured.under_way += 1
    try:
        measured.records.append(await send(session, url, body, late))
    except asyncio.CancelledError:
        measured.records.append(Record(sent, end=perf_counter(), late=late, interrupted=True))
        raise
    finally:
        measured.under_way -= 1


async def _all_or_stop(tasks: list[asyncio.Task[None]], measured: Measured, stop: asyncio.Event) -> None:
    """Waits for the tasks; when it is stopped, ends them."""
    stopping = asyncio.create_task(stop.wait())
    everything = asyncio.gather(*tasks)
    either: list[asyncio.Future[Any]] = [everything, stopping]
    await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if everything.done():
        await everything
        return
    measured.stopped = True
    everything.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _metronome(measured: Measured, watch: Callable[[Measured], None]) -> None:
    """Sleeps for a moment, over and over: how late it wakes is how late this process sees anything."""
    for tick in itertools.count():
        due = perf_counter() + _TICK
        await asyncio.sleep(_TICK)
        measured.lags.append(max(0.0, perf_counter() - due))
        if tick % 25 == 0:
            watch(measured)


@contextmanager
def _interruptible() -> Iterator[asyncio.Event]:
    """An event that the first Ctrl-C sets; a second one ends the process as always."""
    stop, loop = asyncio.Event(), asyncio.get_running_loop()

    def on_interrupt() -> None:
        stop.set()
        loop.remove_signal_handler(signal.SIGINT)

    loop.add_signal_handler(signal.SIGINT, on_interrupt)
    try:
        yield stop
    finally:
        loop.remove_signal_handler(signal.SIGINT)
