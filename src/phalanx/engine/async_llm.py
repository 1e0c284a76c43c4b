"""AsyncLLM: an LLM in a thread of its own, for any number of asyncio tasks."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import Future, InvalidStateError
from typing import Any

from phalanx.engine.llm import LLM, Messages, Prompt
from phalanx.engine.outputs import Chunk, RequestOutput
from phalanx.engine.request_group import RequestGroup
from phalanx.engine.sampling_params import SamplingParams, sampling_params


class EngineDead(RuntimeError):
    """The engine has ended by an error, which this names; it takes no more requests."""


class AsyncLLM:
    """Serves many tasks at once; what they ask for is batched.

    Args:
        model, settings: as for LLM; or an LLM itself, which then belongs to this object.
    """

    def __init__(self, model: Any, config: Any = None, **settings: Any) -> None:
        self.llm = model if isinstance(model, LLM) else LLM(model, config, **settings)
        self._orders: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._listeners: dict[str, Callable[[Any], None]] = {}
        self._fault: BaseException | None = None
        self._gate = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="phalanx engine", daemon=True)
        self._thread.start()

    async def stream(
        self,
        prompt: Prompt | Messages,
        params: SamplingParams | dict[str, Any] | None = None,
        *,
        template_options: Mapping[str, Any] | None = None,
        cache_salt: str = "",
        **overrides: Any,
    ) -> AsyncIterator[Chunk]:
        """The answer to one prompt or conversation as it comes; leaving it early aborts the request.

        Raises:
            ValueError: a bad prompt or setting. EngineDead: the engine has ended.
        """
        chunks: asyncio.Queue[list[Chunk] | BaseException] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def listen(group: RequestGroup | BaseException) -> None:
            item = group if isinstance(group, BaseException) else list(group.chunks())
            loop.call_soon_threadsafe(chunks.put_nowait, item)

        setting = sampling_params(params, **overrides)
        name = await self._begin(prompt, setting, template_options or {}, cache_salt, listen)
        running = setting.n
        try:
            while running:
                item = await chunks.get()
                if isinstance(item, BaseException):
                    raise EngineDead(f"the engine has ended: {item}") from item
                for chunk in item:
                    running -= chunk.finish_reason is not None
                    yield chunk
        finally:
            self._forget(name)

    async def generate(
        self,
        prompt: Prompt | Messages,
        params: SamplingParams | dict[str, Any] | None = None,
        *,
        template_options: Mapping[str, Any] | None = None,
        cache_salt: str = "",
        **overrides: Any,
    ) -> RequestOutput:
        """The whole answer to one prompt or conversation; cancelling the task aborts the request."""
        done: Future[RequestOutput] = Future()

        def listen(group: RequestGroup | BaseException) -> None:
            if done.done():
                return
            if isinstance(group, BaseException):
                done.set_exception(EngineDead(f"the engine has ended: {group}"))
            elif group.finished:
                done.set_result(group.output())

        setting = sampling_params(params, **overrides)
        name = await self._begin(prompt, setting, template_options or {}, cache_salt, listen)
        try:
            return await asyncio.wrap_future(done)
        finally:
            self._forget(name)

    def close(self) -> None:
        """Ends the engine; requests that still run get EngineDead. Closing twice is fine."""
        if self._thread.is_alive():
            self._orders.put(None)
            self._thread.join()
        self.llm.close()

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, *error: Any) -> None:
        await asyncio.to_thread(self.close)

    # -- from the tasks' side

    async def _begin(
        self,
        prompt: Prompt | Messages,
        params: SamplingParams,
        template_options: Mapping[str, Any],
        cache_salt: str,
        listen: Callable[[Any], None],
    ) -> str:
        started: Future[str] = Future()

        def begin() -> None:
            try:
                if self._fault is not None:
                    raise EngineDead(f"the engine has ended: {self._fault}")
                asked = self.llm.prompt_of(prompt, template_options)
                name = self.llm.add_request(asked, params, cache_salt=cache_salt)
                self._listeners[name] = listen
                started.set_result(name)
            except BaseException as error:
                started.set_exception(error)

        with self._gate:
            if self._fault is not None:
                raise EngineDead(f"the engine has ended: {self._fault}")
            self._orders.put(begin)
        try:
            return await asyncio.shield(asyncio.wrap_future(started))
        except asyncio.CancelledError:
            # The task was cancelled before its request began.
            started.add_done_callback(lambda future: None if future.exception() else self._forget(future.result()))
            raise

    def _forget(self, name: str) -> None:
        """Nobody waits for this request any more; one that has ended is gone already."""
        self._orders.put(lambda: self._drop(name))

    # -- in the engine's thread

    def _run(self) -> None:
        fault: BaseException = RuntimeError("it was closed")
        try:
            while self._obey():
                if self.llm.has_work:
                    for group in self.llm.step():
                        self._tell(group.request_id, group)
        except BaseException as error:
            fault = error
            self.llm.close()
        with self._gate:
            self._fault = fault
        for name in list(self._listeners):
            self._tell(name, fault)
        self._listeners.clear()
        while not self._orders.empty():
            order = self._orders.get()
            if order is not None:
                order()

    def _tell(self, name: str, what: Any) -> None:
        """Tells a request's listener; one that cannot be told any more (its event loop is closed) is dropped."""
        try:
            if name in self._listeners:
                self._listeners[name](what)
        except (RuntimeError, InvalidStateError):
            self._drop(name)

    def _obey(self) -> bool:
        """Does what the tasks have ordered; waits for an order while there is nothing to run. False at the end."""
        while True:
            try:
                order = self._orders.get(block=not self.llm.has_work)
            except queue.Empty:
                return True
            if order is None:
                return False
            order()

    def _drop(self, name: str) -> None:
        self._listeners.pop(name, None)
        self.llm.abort(name)
