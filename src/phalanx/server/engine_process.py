"""The engine's own process: ``python -m phalanx.distributed.child phalanx.server.engine_process FD``.

One thread does nearly everything: it reads what the HTTP process has sent, runs a step, and sends what the step gave.
Writing never waits for the reader, so that a busy HTTP process does not hold up the engine. Only guides, which may take
seconds to compile, are compiled beside it; the requests that need them begin then.
"""

from __future__ import annotations

import gc
import logging
import os
import queue
import select
import signal
import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from phalanx.engine.guides import Guide
from phalanx.engine.llm import LLM
from phalanx.engine.pooling import unit
from phalanx.engine.request_group import RequestGroup
from phalanx.engine.sampling_params import SamplingParams, sampling_params
from phalanx.server.engine_messages import (
    Abort,
    Beginning,
    Fault,
    FrameReader,
    FromEngine,
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
    to_engine_decoder,
)

_STATS_SECONDS = 0.2
_READ_BYTES = 1 << 20
_LAST_WORDS_SECONDS = 2.0
_COMPILING_THREADS = 4


class Wire:
    """The engine's end of the socket."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._frames = FrameReader()
        self._unsent = bytearray()
        self._woken, self._waker = socket.socketpair()

    def wake(self) -> None:
        """Ends the wait of ``receive``. For other threads."""
        # A full buffer wakes as well.
        with suppress(BlockingIOError):
            self._waker.send(b"w", socket.MSG_DONTWAIT)

    def receive(self, wait: float | None) -> list[ToEngine]:
        """The messages that have come; without any, waits so many seconds for some (None: as long as it takes).

        Raises:
            EOFError: the HTTP process has gone.
        """
        sources = [self._socket, self._woken]
        ready, _, _ = select.select(sources, [self._socket] if self._unsent else [], [], wait)
        self._flush()
        if self._woken in ready:
            self._woken.recv(_READ_BYTES)
        if self._socket not in ready:
            return []
        data = self._socket.recv(_READ_BYTES)
        if not data:
            raise EOFError("the HTTP process has gone")
        return [to_engine_decoder.decode(payload) for payload in self._frames.feed(data)]

    def send(self, message: FromEngine) -> None:
        """Sends a message as soon as the reader has room for it."""
        self._unsent += frame(message)
        self._flush()

    def finish(self) -> None:
        """Waits a little until everything is sent."""
        deadline = time.monotonic() + _LAST_WORDS_SECONDS
        while self._unsent and time.monotonic() < deadline:
            select.select([], [self._socket], [], 0.1)
            self._flush()

    def _flush(self) -> None:
        with suppress(BlockingIOError):
            while self._unsent:
                sent = self._socket.send(self._unsent, socket.MSG_DONTWAIT)
                del self._unsent[:sent]


class EngineLoop:
    """Runs what the HTTP process asks for until it says to end."""

    def __init__(self, llm: LLM, wire: Wire) -> None:
        self.llm = llm
        self.wire = wire
        self._groups: dict[str, Running] = {}
        self._compiling: dict[int, tuple[Submit, SamplingParams]] = {}
        self._compiled: queue.SimpleQueue[tuple[int, ValueError | None]] = queue.SimpleQueue()
        self._threads = ThreadPoolExecutor(_COMPILING_THREADS, "phalanx guides")
        self._told_at = 0.0
        self._told_idle = True
        self._changed = False

    def run(self) -> None:
        """Returns when told to end.

        Raises:
            EOFError: the HTTP process has gone. Whatever a step of the engine raises: it cannot go on.
        """
        while True:
            for message in self.wire.receive(0.0 if self.llm.has_work else None):
                if isinstance(message, Shutdown):
                    return
                self._obey(message)
            self._begin_compiled()
            pieces = self._step() if self.llm.has_work else []
            stats = self.llm.stats() if self._tells() else None
            if pieces or stats is not None:
                self.wire.send(Outputs(pieces, stats))

    def _obey(self, message: ToEngine) -> None:
        if isinstance(message, Submit):
            self._submit(message)
        elif isinstance(message, Abort):
            self._compiling.pop(message.number, None)
            self._groups.pop(str(message.number), None)
            self.llm.abort(str(message.number))
        self._changed = True

    def _submit(self, message: Submit) -> None:
        try:
            params = sampling_params(message.params)
            if params.guide is None or self.llm.guides.knows(params.guide):
                self._begin(message, params)
                return
        except ValueError as error:
            self.wire.send(Refused(message.number, str(error)))
            return
        self._compiling[message.number] = (message, params)
        self._threads.submit(self._compile, message.number, params.guide)

    def _begin(self, message: Submit, params: SamplingParams) -> None:
        name = str(message.number)
        self.llm.add_request(
            message.token_ids, params, request_id=name, cache_salt=message.cache_salt, pooling=message.pooling
        )
        self._groups[name] = Running(message.number, message.streamed, self.llm.group_of(name))

    def _compile(self, number: int, guide: Guide) -> None:
        """In another thread."""
        fault = None
        try:
            self.llm.guides.compile(guide)
        except ValueError as error:
            fault = error
        self._compiled.put((number, fault))
        self.wire.wake()

    def _begin_compiled(self) -> None:
        """Begins the requests whose guides are ready by now."""
        while not self._compiled.empty():
            number, fault = self._compiled.get()
            # Aborted meanwhile, it is not there any more.
            message, params = self._compiling.pop(number, (None, None))
            if message is None or params is None:
                continue
            try:
                if fault is not None:
                    raise fault
                self._begin(message, params)
            except ValueError as error:
                self.wire.send(Refused(number, str(error)))

    def _step(self) -> list[Piece]:
        pieces: list[Piece] = []
        for group in self.llm.step():
            pieces += self._groups[group.request_id].pieces()
            if group.finished:
                del self._groups[group.request_id]
        self._changed = True
        return pieces

    def _tells(self) -> bool:
        """Whether it is time for statistics: a few times a second, and whenever work begins or ends."""
        idle, now = not self.llm.has_work, time.monotonic()
        news = idle != self._told_idle or (self._changed and (idle or now - self._told_at >= _STATS_SECONDS))
        if news:
            self._told_at, self._told_idle, self._changed = now, idle, False
        return news


class Running:
    """A request that runs or waits, and what was sent of it."""

    def __init__(self, number: int, streamed: bool, group: RequestGroup) -> None:
        self.number = number
        self.streamed = streamed
        self.group = group
        self._first_token_at = 0.0
        self._said_beginning = False

    def pieces(self) -> list[Piece]:
        """What is to be sent after a step that touched the request."""
        self._first_token_at = self._first_token_at or time.monotonic()
        if not (self.streamed or self.group.finished):
            return []
        pieces = [
            Piece(
                number=self.number,
                index=chunk.index,
                text=chunk.text,
                token_ids=chunk.token_ids,
                logprobs=chunk.logprobs,
                finish_reason=chunk.finish_reason,
                stop_reason=chunk.stop_reason,
                error=chunk.error,
            )
            for chunk in self.group.chunks()
        ]
        if pieces and not self._said_beginning:
            self._said_beginning = True
            pieces[0].beginning = self._beginning()
        first = self.group.requests[0]
        if first.pooling and first.finish_reason == "stop":
            pieces[0].vector = unit(first.state).tobytes()
        return pieces

    def _beginning(self) -> Beginning:
        first = self.group.requests[0]
        logprobs = first.prompt_logprobs if first.params.prompt_logprobs is not None else None
        return Beginning(first.started_at, self._first_token_at, first.cached_tokens, logprobs)


def main(descriptor: int) -> int:
    """Serves the HTTP process at the other end of a socket; returns the exit code."""
    logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
    # It ends when it is told to, or with its parent: a signal to the whole group of processes must not break off what
    # the HTTP process still waits for.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.set_inheritable(descriptor, False)
    wire = Wire(socket.socket(fileno=descriptor))
    try:
        start = _first(wire)
        try:
            llm = LLM(start.model, start.settings)
        except Exception as error:
            wire.send(StartFailed(str(error) or type(error).__name__, isinstance(error, (ValueError, OSError))))
            wire.finish()
            return 1
        return _serve(llm, wire)
    except (EOFError, ConnectionError):
        return 0


def _first(wire: Wire) -> Start:
    while not (messages := wire.receive(None)):
        pass
    if not isinstance(messages[0], Start):
        raise RuntimeError(f"the first message must be Start, got {type(messages[0]).__name__}")
    return messages[0]


def _serve(llm: LLM, wire: Wire) -> int:
    try:
        # Reading a vocabulary takes a second, which the first guided request is spared. A model that cannot be guided
        # says so when a guide is asked for.
        with suppress(ValueError):
            llm.guides.compile(Guide(kind="json_object"))
        # What is there now stays: collections need not look at it again.
        gc.collect()
        gc.freeze()
        wire.send(
            Ready(
                max_model_len=llm.max_model_len,
                vocab_size=llm.engine.model.vocab_size,
                max_num_seqs=llm.engine.max_num_seqs,
                eos_token_ids=sorted(llm.eos_token_ids),
                stats=llm.stats(),
            )
        )
        EngineLoop(llm, wire).run()
        return 0
    except (EOFError, ConnectionError):
        return 0
    except Exception as error:
        logging.getLogger("phalanx").exception("the engine has ended by an error")
        wire.send(Fault(f"{type(error).__name__}: {error}"))
        wire.finish()
        return 1
    finally:
        llm.close()
        # Libraries with bindings of their own report what is never collected as leaks.
        gc.unfreeze()


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
