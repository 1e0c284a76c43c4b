"""What the HTTP process and the engine's process say to each other: msgpack frames over one stream socket.

A frame is four bytes of length, little-endian, and one message. Times are of ``time.monotonic``, which the processes of
a machine share.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from phalanx.engine.statistics import EngineStatistics

_LENGTH_BYTES = 4


class Start(msgspec.Struct, tag="start", array_like=True):
    """The first message: build this model with these settings of EngineConfig."""

    model: str
    settings: dict[str, Any]


class Submit(msgspec.Struct, tag="submit", array_like=True):
    """A prompt to answer.

    Attributes:
        number: names the request in all that follows.
        params: the fields of SamplingParams that are not at their default.
        streamed: pieces come as they are drawn; otherwise all answers come once the last of them has ended.
        pooling: "last" or "mean": the prompt's embedding is wanted, and no answer.
    """

    number: int
    token_ids: list[int]
    params: dict[str, Any]
    cache_salt: str
    streamed: bool
    pooling: str | None = None


class Abort(msgspec.Struct, tag="abort", array_like=True):
    """Nobody waits for this request any more; unknown and finished ones are left alone."""

    number: int


class Shutdown(msgspec.Struct, tag="shutdown", array_like=True):
    """End."""


class Ready(msgspec.Struct, tag="ready", array_like=True):
    """The engine takes requests now.

    Attributes:
        eos_token_ids: the model's own end tokens.
    """

    max_model_len: int
    vocab_size: int
    max_num_seqs: int
    eos_token_ids: list[int]
    stats: EngineStatistics


class StartFailed(msgspec.Struct, tag="start_failed", array_like=True):
    """The engine could not be built.

    Attributes:
        bad_input: by what was asked for, not by an accident.
    """

    message: str
    bad_input: bool


class Beginning(msgspec.Struct, array_like=True):
    """What is known of a prompt once its first answer has begun.

    Attributes:
        scheduled_at, first_token_at: when it got a place in a step, and when its first token was drawn.
        cached_tokens: prompt tokens whose KV was found in the prefix cache.
        prompt_logprobs: a token -> log-probability dict a token, the token's own first; None for the first token.
    """

    scheduled_at: float
    first_token_at: float
    cached_tokens: int
    prompt_logprobs: list[dict[int, float | None] | None] | None


class Piece(msgspec.Struct, array_like=True):
    """What an answer has gained, as in ``phalanx.engine.outputs.Chunk``; a prompt's first one has a ``beginning``. That
    of an embedding has the ``vector``, float32."""

    number: int
    index: int
    text: str
    token_ids: list[int]
    logprobs: list[dict[int, float | None]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    beginning: Beginning | None = None
    vector: bytes | None = None


class Outputs(msgspec.Struct, tag="outputs", array_like=True):
    """What a step gave, of all requests together; statistics a few times a second."""

    pieces: list[Piece]
    stats: EngineStatistics | None = None


class Refused(msgspec.Struct, tag="refused", array_like=True):
    """A request that the engine cannot take, and why."""

    number: int
    message: str


class Fault(msgspec.Struct, tag="fault", array_like=True):
    """The engine has ended by an error."""

    message: str


ToEngine = Start | Submit | Abort | Shutdown
FromEngine = Ready | StartFailed | Outputs | Refused | Fault

_encoder = msgspec.msgpack.Encoder()
to_engine_decoder: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
from_engine_decoder: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)


def frame(message: ToEngine | FromEngine) -> bytes:
    """A message as it goes over the socket."""
    payload = _encoder.encode(message)
    return len(payload).to_bytes(_LENGTH_BYTES, "little") + payload


class FrameReader:
    """Cuts a stream of bytes, arriving in any pieces, into payloads of frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The payloads that are complete with these bytes."""
        self._buffer += data
        start = 0
        while len(self._buffer) - start >= _LENGTH_BYTES:
            first = start + _LENGTH_BYTES
            end = first + int.from_bytes(self._buffer[start:first], "little")
            if len(self._buffer) < end:
                break
            yield bytes(self._buffer[first:end])
            start = end
        del self._buffer[:start]
