import json

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from phalanx.weights import WeightError, open_source
from phalanx.weights.gguf.tokenizer import build_tokenizer

TEXT = "the cat sat on the mat, in 2024 and 12345 and 678 it's THE CAT'S mat\n\n  the end of the mat " * 20
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"


@pytest.fixture(scope="module")
def trained():
    """Tokens and merges of a byte-level vocabulary that would merge digits if it were let."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=specials, initial_alphabet=alphabet)
    tokenizer.train_from_iterator([TEXT], trainer)
    model = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": [*tokens, "<tool>"],
        "tokenizer.ggml.token_type": [3, 3, 3, *[1] * (len(tokens) - 3), 4],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in model["merges"]],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": TEMPLATE,
    }


def built(trained, pre, **changes):
    values = {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    return build_tokenizer({**trained, "tokenizer.ggml.pre": pre, **values})


def words(tokenizer, text):
    return [word for word, _ in tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str(text)]


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("gpt-2", ["it", "'s", "Ġ12345", "Ġok"]),
        ("smollm", ["it", "'s", "Ġ", "1", "2", "3", "4", "5", "Ġok"]),
        ("llama-bpe", ["it", "'s", "Ġ", "123", "45", "Ġok"]),
        ("qwen2", ["it", "'s", "Ġ", "1", "2", "3", "4", "5", "Ġok"]),
    ],
)
def test_each_rule_splits_digits_its_own_way(trained, pre, expected):
    assert words(built(trained, pre), "it's 12345 ok") == expected


def test_rules_differ_in_contractions_and_newlines(trained):
    assert words(built(trained, "qwen2"), "IT'S\n\n x") == ["IT", "'S", "ĊĊ", "Ġx"]
    assert words(built(trained, "smollm"), "IT'S\n\n x") == ["IT", "'", "S", "ĊĊ", "Ġx"]


@pytest.mark.parametrize("pre", ["gpt-2", "smollm", "llama-bpe"])
def test_ids_decode_to_the_text(trained, pre):
    tokenizer = built(trained, pre, add_bos_token=False)

    @settings(deadline=None)
    @given(st.text(max_size=40))
    def check(text):
        assert tokenizer.decode(tokenizer(text).input_ids) == text

    check()


def test_qwen_texts_are_composed(trained):
    tokenizer = built(trained, "qwen2")
    assert tokenizer.decode(tokenizer("e\N{COMBINING ACUTE ACCENT}").input_ids) == "\N{LATIN SMALL LETTER E WITH ACUTE}"


def test_special_tokens_are_found_in_the_text_and_skipped(trained):
    tokenizer = built(trained, "smollm")
    ids = tokenizer("<|im_start|>cat<tool><|im_end|>").input_ids
    assert (ids[0], ids[-1]) == (1, 2) and ids[-2] == tokenizer.convert_tokens_to_ids("<tool>")
    assert tokenizer.decode(ids, skip_special_tokens=True) == "cat<tool>"
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")


def test_the_chat_template_comes_along(trained):
    text = built(trained, "smollm").apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert text == "<|im_start|>user\nhi<|im_end|>\n"
    named = {**trained, "tokenizer.ggml.pre": "smollm", "tokenizer.chat_templates": ["tool"]}
    named["tokenizer.chat_template.tool"] = "T"
    assert build_tokenizer(named).get_chat_template("tool") == "T"


def test_bos_is_added_where_the_file_or_the_rule_says_so(trained):
    cat = built(trained, "smollm")("cat").input_ids
    assert 1 not in cat
    assert built(trained, "llama-bpe")("cat").input_ids == [1, *cat]
    assert built(trained, "smollm", add_bos_token=True, add_eos_token=True)("cat").input_ids == [1, *cat, 2]
    assert built(trained, "llama-bpe", add_bos_token=False)("cat").input_ids == cat
    pair = built(trained, "llama-bpe")("cat", "cat").input_ids
    assert pair == [1, *cat, 1, *cat]


def test_the_tokenizer_survives_saving(trained, tmp_path):
    from transformers import AutoTokenizer

    tokenizer = built(trained, "smollm")
    tokenizer.save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    assert again(TEXT).input_ids == tokenizer(TEXT).input_ids
    assert again.chat_template == TEMPLATE


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokenizer.ggml.pre": "martian"}, "rule 'martian', which is not known here .*: pass the path"),
        ({}, "rule 'default'"),
        ({"tokenizer.ggml.model": "rwkv"}, "tokenizer of kind 'rwkv'"),
        ({"tokenizer.ggml.model": None}, "holds no tokenizer"),
        ({"tokenizer.ggml.pre": "gpt-2", "tokenizer.ggml.tokens": ["a", "a"]}, "1 tokens of the GGUF file come twice"),
    ],
)
def test_unknown_tokenizers_are_refused_by_name(trained, changes, message):
    with pytest.raises(WeightError, match=message):
        build_tokenizer({**trained, **changes})


PIECES = ["▁", "a", "b", "c", "ab", "▁a", "▁ab", "bc"]


@pytest.fixture
def sentence_piece():
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * 259 + [-10.0, -11.0, -12.0, -13.0, -3.0, -2.0, -1.0, -0.5],
        "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * len(PIECES)],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


def test_sentence_piece_merges_by_score(sentence_piece):
    tokenizer = build_tokenizer(sentence_piece)
    assert tokenizer.convert_ids_to_tokens(tokenizer("ab").input_ids) == ["<s>", "▁ab"]
    # bc has the best score, so it is merged before ab could be
    assert tokenizer.convert_ids_to_tokens(tokenizer("abc a").input_ids) == ["<s>", "▁a", "bc", "▁a"]


def test_sentence_piece_merges_equal_scores_from_the_left(sentence_piece):
    runs = ["▁▁", "▁▁▁", "▁▁▁▁"]
    sentence_piece["tokenizer.ggml.tokens"] += runs
    sentence_piece["tokenizer.ggml.scores"] += [-1e9] * len(runs)
    sentence_piece["tokenizer.ggml.token_type"] += [1] * len(runs)
    tokenizer = build_tokenizer(sentence_piece)
    assert tokenizer.convert_ids_to_tokens(tokenizer("      c").input_ids) == ["<s>", "▁▁▁▁", "▁▁▁", "c"]


def test_sentence_piece_falls_back_to_bytes_and_decodes(sentence_piece):
    tokenizer = build_tokenizer(sentence_piece)
    ids = tokenizer("a é😀 b").input_ids
    assert "<0xC3>" in tokenizer.convert_ids_to_tokens(ids)
    assert tokenizer.decode(ids, skip_special_tokens=True) == "a é😀 b"


def test_sentence_piece_without_a_space_in_front(sentence_piece):
    tokenizer = build_tokenizer({**sentence_piece, "tokenizer.ggml.add_space_prefix": False})
    assert tokenizer.convert_ids_to_tokens(tokenizer("ab").input_ids) == ["<s>", "ab"]
    assert tokenizer.decode(tokenizer(" ab").input_ids, skip_special_tokens=True) == " ab"


def test_a_source_gives_its_tokenizer(build, trained):
    builder = build().tensor("output.weight", numpy.ones((4, 4), numpy.float32))
    builder.writer.add_tokenizer_model("gpt2")
    builder.writer.add_tokenizer_pre("smollm")
    builder.writer.add_token_list(trained["tokenizer.ggml.tokens"])
    builder.writer.add_token_types(trained["tokenizer.ggml.token_type"])
    builder.writer.add_token_merges(trained["tokenizer.ggml.merges"])
    assert open_source(builder.write()).tokenizer()(TEXT).input_ids == built(trained, "smollm")(TEXT).input_ids
