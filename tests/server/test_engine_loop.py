"""The engine's own loop, in a thread of this process."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from phalanx import LLM, Guide
from phalanx.server.engine_messages import (
    Abort,
    FrameReader,
    Outputs,
    Piece,
    Refused,
    Shutdown,
    Submit,
    ToEngine,
    frame,
    from_engine_decoder,
)
from phalanx.server.engine_process import EngineLoop, Wire


class Http:
    """The other end of the socket."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._frames = FrameReader()
        self._socket.settimeout(20)
        self.heard: list[Any] = []

    def send(self, message: ToEngine) -> None:
        self._socket.sendall(frame(message))

    def until_end(self, number: int) -> list[Piece] | Refused:
        """Reads on until this request has ended; its pieces, or why it was refused."""
        while True:
            mine = [piece for piece in self.pieces() if piece.number == number]
            if mine and mine[-1].finish_reason is not None:
                return mine
            for message in self.heard:
                if isinstance(message, Refused) and message.number == number:
                    return message
            self.heard += map(from_engine_decoder.decode, self._frames.feed(self._socket.recv(1 << 20)))

    def pieces(self) -> list[Piece]:
        return [piece for message in self.heard if isinstance(message, Outputs) for piece in message.pieces]


@pytest.fixture(scope="module")
def llm(tiny_folder: Path) -> Iterator[LLM]:
    with LLM(tiny_folder, num_blocks=200, block_size=8, max_model_len=256) as made:
        yield made


@pytest.fixture
def http(llm: LLM) -> Iterator[Http]:
    ours, theirs = socket.socketpair()
    thread = threading.Thread(target=EngineLoop(llm, Wire(theirs)).run)
    thread.start()
    other = Http(ours)
    yield other
    other.send(Shutdown())
    thread.join(20)
    assert not thread.is_alive()
    ours.close()


def guided(number: int, guide: Guide) -> Submit:
    return Submit(number, [5, 6], {"guide": guide.model_dump(), "max_tokens": 20}, "", True)


def test_a_guide_that_compiles_for_long_holds_up_nobody(llm: LLM, http: Http, monkeypatch: pytest.MonkeyPatch) -> None:
    compile_now, may_end = llm.guides.compile, threading.Event()

    def slowly(guide: Guide) -> Any:
        if not llm.guides.knows(guide):
            assert may_end.wait(20)
        return compile_now(guide)

    monkeypatch.setattr(llm.guides, "compile", slowly)
    slow, refused = Guide(kind="choice", text=["yes", "no"]), Guide(kind="regex", text="(")
    http.send(guided(1, slow))
    http.send(guided(2, refused))
    http.send(guided(3, Guide(kind="choice", text=["never"])))
    http.send(Submit(4, [5, 6, 7], {"max_tokens": 30, "ignore_eos": True}, "", True))
    free = http.until_end(4)
    assert sum(len(piece.token_ids) for piece in free) == 30 and {piece.number for piece in http.pieces()} == {4}
    http.send(Abort(3))
    # The abort is read before what is compiled begins: both come through the same loop.
    time.sleep(0.2)
    may_end.set()
    answer = http.until_end(1)
    assert "".join(piece.text for piece in answer) in ("yes", "no")
    assert isinstance(fault := http.until_end(2), Refused) and "regular expression" in fault.message
    # Compiled once, it begins at once.
    monkeypatch.setattr(llm.guides, "compile", compile_now)
    http.send(guided(5, slow))
    assert "".join(piece.text for piece in http.until_end(5)) in ("yes", "no")
    assert 3 not in {piece.number for piece in http.pieces()} and not llm.has_work


def test_an_embedding_beside_a_stream(llm: LLM, http: Http) -> None:
    http.send(Submit(1, [5, 6, 7], {"max_tokens": 60, "ignore_eos": True}, "", True))
    http.send(Submit(2, [5, 6, 7], {}, "", False, "last"))
    (piece,) = http.until_end(2)
    assert piece.vector is not None and piece.finish_reason == "stop" and piece.beginning is not None
    assert piece.text == "" and piece.token_ids == []
    answer = http.until_end(1)
    assert sum(len(piece.token_ids) for piece in answer) == 60
    http.send(Submit(3, [5], {}, "", False, "max"))
    assert isinstance(fault := http.until_end(3), Refused) and "pooling" in fault.message
