"""A server with an OpenAI-compatible API whose answers have known timings."""

from __future__ import annotations

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Stub:
    """The server and what it was asked.

    Attributes:
        first, between: seconds to the first token, and between tokens.
        per_event: tokens in an event.
        counts: whether usage is sent.
        statuses: how the next requests are answered, one each; 0 breaks the stream off, -1 sends an error in it.
        asked, keys: bodies and Authorization headers, as they came.
        times: when.
    """

    def __init__(self, first: float = 0.05, between: float = 0.01) -> None:
        self.first, self.between, self.per_event, self.counts = first, between, 1, True
        self.statuses: list[int] = []
        self.asked: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.times: list[float] = []
        stub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: Any) -> None:
                """Quiet."""

            def do_GET(self) -> None:
                _whole(self, 200, {"data": [{"id": "stub-model"}]})

            def do_POST(self) -> None:
                stub.answer(self)

        class Server(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, *_: Any) -> None:
                """Clients that leave are no news."""

        self._server = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        """Streams as many tokens as were asked for."""
        body = json.loads(request.rfile.read(int(request.headers["Content-Length"])))
        self.times.append(time.perf_counter())
        self.asked.append(body)
        self.keys.append(request.headers["Authorization"])
        status = self.statuses.pop(0) if self.statuses else 200
        if status > 0 and status != 200:
            _whole(request, status, {"error": {"message": f"refused with {status}"}})
            return
        request.send_response(200)
        request.send_header("Content-Type", "text/event-stream")
        request.send_header("Connection", "close")
        request.end_headers()
        chat, length = "messages" in body, body["max_tokens"]
        piece = {"delta": {"content": "x"}} if chat else {"text": "x"}
        time.sleep(self.first)
        for at in range(0, length, self.per_event):
            if at:
                time.sleep(self.between)
            _event(request, {"choices": [{"index": 0, **piece, "finish_reason": None}]})
        if status == -1:
            _event(request, {"error": {"message": "the engine is lost"}})
        if status <= 0:
            request.close_connection = True
            return
        _event(
            request,
            {"choices": [{"index": 0, **(piece | {"text": ""}), "finish_reason": "length"}]}
            if not chat
            else {"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]},
        )
        if self.counts:
            prompt = body.get("prompt", "")
            tokens = len(prompt) if isinstance(prompt, list) else 5
            _event(request, {"choices": [], "usage": {"prompt_tokens": tokens, "completion_tokens": length}})
        request.wfile.write(b"data: [DONE]\n\n")
        request.close_connection = True


def _event(request: BaseHTTPRequestHandler, fields: dict[str, Any]) -> None:
    request.wfile.write(b"data: " + json.dumps(fields).encode() + b"\n\n")
    request.wfile.flush()


def _whole(request: BaseHTTPRequestHandler, status: int, fields: dict[str, Any]) -> None:
    body = json.dumps(fields).encode()
    request.send_response(status)
    request.send_header("Content-Length", str(len(body)))
    request.end_headers()
    request.wfile.write(body)
