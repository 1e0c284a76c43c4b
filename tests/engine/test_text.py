"""Streams of text: whole characters, no part of a stop text, and in the end the tokenizer's own decoding."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from phalanx.engine.text import TextStream, Vocabulary
from tests.tiny_tokenizer import tiny_tokenizer

BYTES = tiny_tokenizer()
BYTE_LEVEL = Vocabulary(BYTES)


def sentencepiece_like() -> PreTrainedTokenizerFast:
    """Words with a leading mark, and single bytes for all else: the decoder that Llama 2's tokenizer has."""
    words = ["▁", "▁a", "▁the", "b", "▁hello", "lo", ".", "é", "▁世", "界"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{value:02X}>" for value in range(256)), *words]
    tokenizer = Tokenizer(models.BPE({token: place for place, token in enumerate(tokens)}, [], byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in tokens[:3]])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


TOKENIZERS = {"byte-level": BYTES, "sentencepiece": sentencepiece_like()}


def streamed(stream: TextStream, ids: list[int]) -> tuple[str, list[str]]:
    pieces = []
    for token in ids:
        stopped = stream.push(token)
        pieces.append(stream.take())
        if stopped is not None:
            break
    stream.close()
    pieces.append(stream.take())
    return "".join(pieces), pieces


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(deadline=None, max_examples=200)
@given(data=st.data(), skip=st.booleans())
def test_pieces_join_to_the_whole_decoding(name: str, data: st.DataObject, skip: bool) -> None:
    tokenizer = TOKENIZERS[name]
    ids = data.draw(st.lists(st.integers(0, len(tokenizer) - 1), max_size=30))
    stream = TextStream(Vocabulary(tokenizer), skip_special_tokens=skip)
    whole, _ = streamed(stream, ids)
    assert whole == stream.text == tokenizer.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)


@settings(deadline=None, max_examples=100)
@given(text=st.text(alphabet=st.sampled_from("aé世🎉👩‍👩‍👧 t"), max_size=20))
def test_characters_over_several_tokens_come_whole(text: str) -> None:
    ids = BYTES(text, add_special_tokens=False)["input_ids"]
    whole, pieces = streamed(TextStream(BYTE_LEVEL), ids)
    assert whole == text
    assert not any("\ufffd" in piece for piece in pieces)


@settings(deadline=None, max_examples=200)
@given(
    before=st.text(alphabet="ab ", max_size=8),
    after=st.text(alphabet="abc ", max_size=5),
    stops=st.lists(st.text(alphabet="abc", min_size=1, max_size=4), min_size=1, max_size=3),
    include=st.booleans(),
)
def test_no_part_of_a_stop_text_is_ever_handed_out(before: str, after: str, stops: list[str], include: bool) -> None:
    text = before + stops[0] + after
    ids = BYTES(text, add_special_tokens=False)["input_ids"]
    whole, pieces = streamed(TextStream(BYTE_LEVEL, stops, include_stop=include), ids)
    # The stop text that is complete first; of those, the one that begins first.
    ends = {text.find(stop) + len(stop): stop for stop in sorted(stops, key=text.find, reverse=True) if stop in text}
    first = min(ends)
    expected = text[: first if include else first - len(ends[first])]
    assert whole == expected
    handed = ""
    for piece in pieces:
        handed += piece
        assert expected.startswith(handed)


def test_a_stop_text_over_two_tokens_and_one_inside_a_token() -> None:
    stream = TextStream(BYTE_LEVEL, ["ell"])
    ids = BYTES("say hello", add_special_tokens=False)["input_ids"]
    assert streamed(stream, ids)[0] == "say h"
    assert stream.stopped == "ell"


def test_stop_texts_before_the_least_number_of_tokens_do_not_count() -> None:
    ids = BYTES("abab ab", add_special_tokens=False)["input_ids"]
    assert streamed(TextStream(BYTE_LEVEL, ["ab"], min_tokens=4), ids)[0] == "abab "


def test_what_was_held_back_comes_at_the_end() -> None:
    ids = BYTES("xab", add_special_tokens=False)["input_ids"]
    stream = TextStream(BYTE_LEVEL, ["abc"])
    for token in ids:
        stream.push(token)
    assert stream.take() == "x"
    stream.close()
    assert stream.take() == "ab"


def test_a_stop_text_that_began_before_the_least_number_of_tokens_counts() -> None:
    ids = BYTES("i9 i9", add_special_tokens=False)["input_ids"]
    assert streamed(TextStream(BYTE_LEVEL, ["i9"], min_tokens=1), ids)[0] == ""
    assert streamed(TextStream(BYTE_LEVEL, ["i9"], min_tokens=2), ids)[0] == "i9 "


def test_a_stop_text_of_a_single_byte_token_ends_at_once() -> None:
    tokenizer = sentencepiece_like()
    newline = tokenizer.convert_tokens_to_ids("<0x0A>")
    stream = TextStream(Vocabulary(tokenizer), ["\n"])
    assert stream.push(tokenizer.convert_tokens_to_ids("▁a")) is None
    assert stream.push(newline) == "\n"
    assert stream.text == "a"
