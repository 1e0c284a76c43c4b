"""A server that speaks the page's routes and streams whatever a test wants, at whatever pace."""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import phalanx

PAGE = Path(phalanx.__file__).parent / "server" / "page" / "index.html"

Script = Iterator[bytes | float]
"""What a stream sends: bytes as one chunk, a number as a pause in seconds."""


def event(**fields: Any) -> bytes:
    """One server-sent event of a chat stream."""
    return b"data: " + json.dumps({"object": "chat.completion.chunk", **fields}, ensure_ascii=False).encode() + b"\n\n"


def delta(finish: str | None = None, logprobs: list[dict[str, Any]] | None = None, **fields: Any) -> bytes:
    """An event of the one choice."""
    choice = {"index": 0, "delta": fields, "finish_reason": finish}
    return event(choices=[{**choice, "logprobs": {"content": logprobs}} if logprobs else choice])


def token(text: str | bytes, p: float, **others: float) -> dict[str, Any]:
    """An entry of ``logprobs.content``: the chosen token's probability, and that of others by their text."""
    raw = text.encode() if isinstance(text, str) else text
    rows = {raw: p, **{name.encode(): chance for name, chance in others.items()}}
    entries = [
        {"token": name.decode(errors="replace"), "logprob": math.log(chance), "bytes": list(name)}
        for name, chance in rows.items()
    ]
    return {**entries[0], "top_logprobs": sorted(entries, key=lambda entry: -entry["logprob"])}


DONE = b"data: [DONE]\n\n"


class Stub:
    """The server and what it was asked.

    Attributes:
        script: what the next answers stream.
        refuse: (status, JSON) with which chats are answered instead.
        key: if set, all but the page, /health and /ready want it.
        healthy, ready: whether the engine lives, and takes requests.
        figures: the series of /metrics.
        asked: bodies of the chats.
        closed: set when a client left a stream before its end.
    """

    def __init__(self) -> None:
        self.script: list[bytes | float] = []
        self.refuse: tuple[int, dict[str, Any]] | None = None
        self.key = ""
        self.healthy = self.ready = True
        self.figures: dict[str, float] = {}
        self.asked: list[dict[str, Any]] = []
        self.closed = threading.Event()
        stub = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: Any) -> None:
                """Quiet."""

            def do_GET(self) -> None:
                stub.get(self)

            def do_POST(self) -> None:
                stub.post(self)

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def get(self, request: BaseHTTPRequestHandler) -> None:
        if request.path == "/":
            answer(request, 200, PAGE.read_bytes(), "text/html; charset=utf-8")
        elif request.path == "/health":
            answer(request, 200 if self.healthy else 503, b"{}")
        elif request.path == "/ready":
            answer(request, 200 if self.ready else 503, b"{}")
        elif not self._let_in(request):
            return
        elif request.path == "/v1/models":
            answer(request, 200, json.dumps({"data": [{"id": "org/Tiny-1B"}, {"id": "other"}]}).encode())
        elif request.path == "/metrics":
            lines = [f"phalanx:{name} {value}" for name, value in self.figures.items()]
            answer(request, 200, "\n".join(["# HELP phalanx:x y", *lines, ""]).encode(), "text/plain")
        else:
            answer(request, 404, b"{}")

    def post(self, request: BaseHTTPRequestHandler) -> None:
        body = json.loads(request.rfile.read(int(request.headers["Content-Length"])))
        if not self._let_in(request):
            return
        self.asked.append(body)
        if self.refuse:
            answer(request, self.refuse[0], json.dumps(self.refuse[1]).encode(), **{"Retry-After": "7"})
            return
        request.send_response(200)
        request.send_header("Content-Type", "text/event-stream")
        request.end_headers()
        try:
            for part in self.script:
                if isinstance(part, bytes):
                    request.wfile.write(part)
                    request.wfile.flush()
                else:
                    time.sleep(part)
        except OSError:
            self.closed.set()

    def _let_in(self, request: BaseHTTPRequestHandler) -> bool:
        if not self.key or request.headers["Authorization"] == f"Bearer {self.key}":
            return True
        answer(request, 401, json.dumps({"error": {"message": "no key was given"}}).encode())
        return False


def answer(
    request: BaseHTTPRequestHandler, status: int, body: bytes, kind: str = "application/json", **headers: str
) -> None:
    """A whole answer."""
    request.send_response(status)
    for name, value in {"Content-Type": kind, "Content-Length": str(len(body)), **headers}.items():
        request.send_header(name, value)
    request.end_headers()
    request.wfile.write(body)
