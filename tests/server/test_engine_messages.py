"""Frames survive any cutting of the stream that carries them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from phalanx.server.engine_messages import (
    Abort,
    Beginning,
    FrameReader,
    Outputs,
    Piece,
    Submit,
    frame,
    from_engine_decoder,
    to_engine_decoder,
)

PIECE = Piece(1, 0, "ü", [5, 6], [{5: -0.5, 7: None}], "stop", 2, None, Beginning(1.0, 2.0, 3, [None, {4: -1.0}]))


@given(st.lists(st.integers(1, 40)))
def test_any_cut_gives_the_same_messages(cuts: list[int]) -> None:
    sent = [Submit(1, [1, 2], {"logit_bias": {5: 1.0}}, "", True), Abort(1), Submit(2, [], {}, "s", False)]
    data, reader, got = b"".join(map(frame, sent)), FrameReader(), []
    for size in [*cuts, len(data)]:
        got += [to_engine_decoder.decode(payload) for payload in reader.feed(data[:size])]
        data = data[size:]
    assert got == sent


def test_pieces_keep_their_ids_and_nulls() -> None:
    (payload,) = FrameReader().feed(frame(Outputs([PIECE])))
    assert from_engine_decoder.decode(payload) == Outputs([PIECE])
