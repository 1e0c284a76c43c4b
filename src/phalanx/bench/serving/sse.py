"""Server-sent events, read from bytes as they come."""

from __future__ import annotations


class EventReader:
    """Cuts a stream of bytes into the data of its events.

    Chunks may end anywhere: inside a character, a line, or the pair of a line end. Comments and fields other than
    ``data`` are skipped.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def push(self, chunk: bytes) -> list[bytes]:
        """The data of each event that this chunk completes."""
        # A line that ends in \r may go on with \n: it waits for the next chunk.
        held = self._rest + chunk
        whole, carriage = (held[:-1], b"\r") if held.endswith(b"\r") else (held, b"")
        *lines, last = whole.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        self._rest = last + carriage
        done = []
        for line in lines:
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                done.append(b"\n".join(self._data))
                self._data = []
        return done
