"""Worker: a thread for what would hold up the event loop, and which nobody waits for at the end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from threading import Thread
from typing import Any, TypeVar

Result = TypeVar("Result")


class Worker:
    """One piece of work after the other. A process ends though a piece of work does not (a chat template may go on for
    ever), which it would not with a ThreadPoolExecutor.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str) -> None:
        self._work: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        Thread(target=self._run, name=name, daemon=True).start()

    async def run(self, work: Callable[[], Result]) -> Result:
        """What the work returns or raises. Whoever stops waiting before it has begun takes it back."""
        future: Future[Result] = Future()
        self._work.put((future, work))
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        """The thread ends with what it has."""
        self._work.put(None)

    def _run(self) -> None:
        while (item := self._work.get()) is not None:
            future, work = item
            if not future.set_running_or_notify_cancel():
                continue
            try:
                result = work()
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)
