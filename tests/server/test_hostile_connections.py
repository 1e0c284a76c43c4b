"""Connections that are never finished, or never read, are no harm to others, and end."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import uvicorn

from phalanx.server.connection import Connection
from tests.server.running import Server

pytestmark = pytest.mark.xdist_group("server")
LONG = b"X-Long: " + b"a" * 1000 + b"\r\n"


@contextmanager
def connected(server: Server) -> Iterator[socket.socket]:
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        yield connection


def told(connection: socket.socket) -> tuple[bytes, Any]:
    """The status line and the JSON of an answer after which the connection is closed."""
    data = b""
    try:
        while piece := connection.recv(65536):
            data += piece
    except ConnectionResetError:
        pass
    head, _, body = data.partition(b"\r\n\r\n")
    return head.split(b"\r\n")[0], json.loads(body)


@pytest.mark.parametrize("line", [LONG, b"a" * 1000, b"\r\n" * 500])
def test_a_head_without_end_is_refused(server: Server, line: bytes) -> None:
    with connected(server) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\n" if line == LONG else b"")
        sent = 0
        try:
            while sent < 4 << 20:
                connection.sendall(line * 20)
                sent += 20 * len(line)
        except OSError:
            pass
        assert sent < 4 << 20
    assert server.http.get("/health").status_code == 200


def test_what_is_no_http_is_told_so_in_the_shape_of_errors(server: Server) -> None:
    with connected(server) as connection:
        connection.sendall(b"\x00\x01\x02\r\n\r\n")
        status, body = told(connection)
    assert status == b"HTTP/1.1 400 Bad Request" and body["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(("method", "status"), [("GET", b"405"), ("POST", b"400")])
def test_an_upgrade_to_websockets_is_an_ordinary_request(server: Server, method: str, status: bytes) -> None:
    with connected(server) as connection:
        head = f"{method} /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: Upgrade, close\r\nUpgrade: websocket\r\n"
        head += "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\nContent-Length: 2\r\n"
        connection.sendall(f"{head}Content-Type: application/json\r\n\r\n{{}}".encode())
        line, body = told(connection)
    assert status in line and body["error"]["message"]


class Quick(Connection):
    """Waits less long."""

    head_seconds = unread_seconds = 0.2


def test_who_says_nothing_or_reads_nothing_is_left() -> None:
    left = asyncio.Event()

    async def endless(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await receive()
        gone = asyncio.create_task(receive())
        while not gone.done():
            await send({"type": "http.response.body", "body": b"x" * 65536, "more_body": True})
        left.set()

    async def work() -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        http = uvicorn.Server(uvicorn.Config(endless, lifespan="off", http=Quick, ws="none", log_config=None))
        task = asyncio.create_task(http.serve(sockets=[listener]))
        address = listener.getsockname()
        silent, slow, unread = [await asyncio.open_connection(*address) for _ in range(3)]
        slow[1].write(b"GET / HTTP/1.1\r\nX: ")
        unread[0]._limit = 1  # type: ignore[attr-defined]
        unread[1].write(b"GET / HTTP/1.1\r\n\r\n")
        async with asyncio.timeout(10):
            for reader, _ in (silent, slow):
                with pytest.raises(ConnectionError):
                    if await reader.read() == b"":
                        raise ConnectionError
            await left.wait()
        http.should_exit = True
        await task

    asyncio.run(work())
