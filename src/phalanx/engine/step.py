"""What rank 0 tells the other ranks of a step: a small typed message, only what has changed."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

LOGITS_NONE, LOGITS_LAST, LOGITS_ALL = 0, 1, 2
POOL_NONE, POOL_LAST, POOL_SUM = 0, 1, 2


class Sampler(msgspec.Struct, array_like=True, frozen=True):
    """How the rows of a slot are sampled; what ``SamplingParams`` says, as numbers. -1 for "not wanted" of logprobs."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    seed: int
    prompt_len: int
    bias: list[tuple[int, float]]
    bad_words: list[list[int]]
    min_tokens: int
    end_ids: list[int]
    logprobs: int
    prompt_logprobs: int
    guided: bool


class Write(msgspec.Struct, array_like=True, frozen=True):
    """Tokens that go into a slot's row of the token table, from column ``start`` on."""

    slot: int
    start: int
    tokens: list[int]


class Row(msgspec.Struct, array_like=True, frozen=True):
    """``count`` tokens of a slot, from position ``start`` on, to be computed.

    Attributes:
        logits: LOGITS_NONE, LOGITS_LAST or LOGITS_ALL of these tokens.
        draw: whether a token is drawn from the last one's logits.
        rope_len: length that decides the rope of its tokens, unless their own position + 1 is larger.
        first_block: column of the block table that ``blocks`` go to.
        blocks: new blocks a KV group.
        pool: what is wanted of these tokens' hidden states: POOL_NONE, POOL_LAST (the last one's) or POOL_SUM.
    """

    slot: int
    start: int
    count: int
    logits: int
    draw: bool
    rope_len: int
    first_block: int
    blocks: list[list[int]]
    pool: int = POOL_NONE


def only_decodes(rows: Sequence[Row]) -> bool:
    """Whether each of these rows adds one token and draws the next from its logits, and wants nothing else."""
    return all(row.count == 1 and row.draw and row.logits == LOGITS_LAST and not row.pool for row in rows)


class Blocks(msgspec.Struct, array_like=True, frozen=True):
    """New blocks of the row ``index`` of a step that goes on with the rows of the last one; as in ``Row``."""

    index: int
    first_block: int
    blocks: list[list[int]]


class Step(msgspec.Struct, tag="step", frozen=True):
    """One forward. Its input ids are ``given``, one after the other, and its result are logits; or they come from the
    token table (``given`` is None), and its rows draw tokens into it: at once, or if it is ``masked``, when the Masks
    follow that say which tokens some of them may draw.

    Attributes:
        further: its rows are those of the last step, each a token further, with these new blocks; ``rows`` is empty.
            Only behind a step whose rows each added one token and drew the next.
    """

    step_id: int
    rows: list[Row]
    writes: list[Write]
    samplers: list[tuple[int, Sampler]]
    given: list[int] | None = None
    masked: bool = False
    further: list[Blocks] | None = None


class Masks(msgspec.Struct, tag="masks", frozen=True):
    """Which tokens the last step's rows may draw: the sampling of a ``masked`` step begins with this.

    Attributes:
        rows: indices of the step's ``rows``, rising; the others are free.
        bits: int32 [len(rows), ceil(vocab / 32)] row by row; token t is bit t % 32 of number t // 32.
    """

    rows: list[int]
    bits: bytes


class Return(msgspec.Struct, tag="return", frozen=True):
    """A call has ended on rank 0 with this encoded result."""

    payload: bytes


class Fail(msgspec.Struct, tag="fail", frozen=True):
    """A call has ended on rank 0 with an error of this kind."""

    kind: str
    message: str


class Serialize(msgspec.Struct, tag="serialize", frozen=True):
    """Write this rank's parameters into a folder."""

    folder: str
    policy: str


class Close(msgspec.Struct, tag="close", frozen=True):
    """The engine ends."""


Message = Step | Masks | Return | Fail | Serialize | Close

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Message)


def encode(message: Message) -> bytes:
    return _encoder.encode(message)


def decode(data: bytes) -> Message:
    """The message that ``encode`` wrote.

    Raises:
        msgspec.DecodeError: anything else.
    """
    result: Message = _decoder.decode(data)
    return result
