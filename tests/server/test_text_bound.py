"""Texts that cannot fit are told by their length; a text that can is never taken for one."""

from __future__ import annotations

import time
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from phalanx.server.text_bound import TextBound
from tests.server.running import NAME, Server

pytestmark = pytest.mark.xdist_group("server")


def tokenizer(pre: Any, normalizer: Any = None, strips: bool = False, byte_fallback: bool = False) -> Any:
    vocab = {letter: place for place, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(vocab={**vocab, "aa": 256}, merges=[("a", "a")], byte_fallback=byte_fallback))
    backend.pre_tokenizer = pre
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.add_special_tokens([AddedToken("<|x|>", rstrip=strips)])
    return PreTrainedTokenizerFast(tokenizer_object=backend)


LEVEL = pre_tokenizers.ByteLevel(add_prefix_space=False)


@pytest.mark.parametrize(
    ("made", "longest"),
    [
        (tokenizer(LEVEL), 5),
        (tokenizer(pre_tokenizers.Sequence([pre_tokenizers.Digits(), LEVEL])), 5),
        (tokenizer(LEVEL, normalizers.NFC()), 20),
        (tokenizer(None, normalizers.Replace(" ", "_"), byte_fallback=True), 5),
        (tokenizer(None, normalizers.Replace("  ", "_"), byte_fallback=True), None),
        (tokenizer(pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), LEVEL])), None),
        (tokenizer(LEVEL, normalizers.Strip()), None),
        (tokenizer(pre_tokenizers.Metaspace()), None),
        (None, None),
    ],
)
def test_the_bound_is_that_of_the_longest_token(made: Any, longest: int | None) -> None:
    bound = TextBound(made)
    assert not bound.exceeded("<|x|>" * 10, 10)
    assert bound.exceeded("x" * 1001, 50) == (longest is not None)
    if longest is not None:
        assert not bound.exceeded("x" * longest * 10, 10) and bound.exceeded("x" * (longest * 10 + 1), 10)


def test_a_token_that_takes_white_space_may_stand_for_any_number_of_it() -> None:
    made = tokenizer(LEVEL, strips=True)
    text = "<|x|>" + " " * 1000
    assert len(made(text)["input_ids"]) == 1 and not TextBound(made).exceeded(text, 1)
    assert TextBound(made).exceeded(text + "x" * 6, 1)


def test_a_text_that_cannot_fit_is_not_tokenised(server: Server) -> None:
    text = "hello ü " * 500_000
    began = time.monotonic()
    for path, fields, param in (
        ("/v1/completions", {"prompt": text}, "prompt"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": text}]}, "messages"),
        ("/v1/responses", {"input": text}, "input"),
        ("/v1/embeddings", {"input": ["x", text]}, "input"),
    ):
        answer = server.http.post(path, json={"model": NAME, **fields})
        error = answer.json()["error"]
        assert answer.status_code == 400 and error["code"] == "context_length_exceeded", answer.text
        assert error["param"] == param and "4096" in error["message"] and "characters" in error["message"]
    assert time.monotonic() - began < 5


def test_long_texts_are_tokenised_beside_the_loop(server: Server) -> None:
    text = "hello ü " * 5000
    found = server.http.post("/tokenize", json={"prompt": text, "return_token_strs": True}).json()
    assert found["count"] == len(found["token_strs"]) > 4000 and found["token_strs"][:2] == ["hell", "o"]
    assert server.http.post("/detokenize", json={"tokens": found["tokens"]}).json()["prompt"] == text
