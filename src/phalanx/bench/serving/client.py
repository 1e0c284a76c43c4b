"""One request: sent, and timed as its events arrive."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, Any

import msgspec

from phalanx.bench.serving.sse import EventReader

if TYPE_CHECKING:
    import aiohttp


@dataclass(slots=True)
class Record:
    """What became of a request. Times are of ``time.perf_counter``.

    Attributes:
        sent, end: when it was sent, and when its last byte came or it failed.
        late: seconds between the moment that it was due (in an open loop) and the one that it was sent.
        events: when each event with text came.
        prompt_tokens, output_tokens: as the server counts them; None where it does not say.
        error: None, or its kind in a few words.
        message: of an error, what the server or the connection said.
        interrupted: whether the measurement was stopped before it was complete.
    """

    sent: float
    end: float = 0.0
    late: float = 0.0
    events: array[float] = field(default_factory=lambda: array("d"))
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    error: str | None = None
    message: str = ""
    interrupted: bool = False


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[Any] | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None

    @property
    def says_something(self) -> bool:
        delta = self.delta
        return bool(self.text or (delta and (delta.content or delta.reasoning_content or delta.tool_calls)))


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


# Only what is measured is decoded: the client must not be what is slow.
_decode: Callable[[bytes], _Event] = msgspec.json.Decoder(_Event).decode


async def send(session: aiohttp.ClientSession, url: str, body: bytes, late: float = 0.0) -> Record:
    """Sends a request and reads its stream to the end. Whatever goes wrong is told by the record, except that the task
    is cancelled."""
    import aiohttp

    record = Record(sent=perf_counter(), late=late)
    try:
        async with session.post(url, data=body, headers={"Content-Type": "application/json"}) as response:
            if response.status != 200:
                record.error = f"HTTP {response.status}"
                record.message = _said(await response.read())
            else:
                await _read(response, record)
    except TimeoutError:
        record.error, record.message = "timeout", "no complete answer in the time that --timeout gives"
    except aiohttp.ClientConnectorError as error:
        record.error, record.message = "cannot connect", str(error)
    except (aiohttp.ClientError, OSError) as error:
        record.error, record.message = "connection lost", str(error) or type(error).__name__
    except msgspec.MsgspecError as error:
        record.error, record.message = "unreadable answer", str(error)
    finally:
        record.end = perf_counter()
    return record


async def _read(response: aiohttp.ClientResponse, record: Record) -> None:
    reader, complete, finished = EventReader(), False, 0.0
    async for chunk in response.content.iter_any():
        now = perf_counter()
        for data in reader.push(chunk):
            if data == b"[DONE]":
                complete = True
                continue
            event = _decode(data)
            if event.error is not None:
                record.error, record.message = "error in the stream", _said(msgspec.json.encode({"error": event.error}))
                return
            if event.usage is not None:
                record.prompt_tokens, record.output_tokens = event.usage.prompt_tokens, event.usage.completion_tokens
            if any(choice.says_something for choice in event.choices):
                record.events.append(now)
            if any(choice.finish_reason for choice in event.choices):
                complete, finished = True, now
    if not complete:
        record.error, record.message = "broken off", "the stream ended before the answer was complete"
    elif not record.events:
        # Tokens without a text, such as an end token at once: the answer came with its end.
        record.events.append(finished or perf_counter())


def _said(body: bytes) -> str:
    """The message of an error in OpenAI's shape, or the start of whatever came."""
    try:
        found: Any = msgspec.json.decode(body)
        return str(found["error"]["message"])[:500]
    except (msgspec.MsgspecError, KeyError, TypeError):
        return body.decode(errors="replace")[:500].strip()
