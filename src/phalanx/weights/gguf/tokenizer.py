"""The tokenizer that a GGUF file describes.

A file gives tokens and merges or scores, but only the *name* of the rule that splits text into words before merging;
a wrong rule gives other ids without an error. So only rules that are known for certain are built.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from phalanx.weights.source import WeightError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_CONTROL, _USER_DEFINED = 3, 4
_UNDERLINE = "\N{LOWER ONE EIGHTH BLOCK}"  # SentencePiece's mark of a space

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_REST}"


class _WordRule(NamedTuple):
    """How text is split before merging, and what goes with it."""

    split: Callable[[], pre_tokenizers.PreTokenizer]
    normalizer: Callable[[], normalizers.Normalizer] | None = None
    ignore_merges: bool = False
    add_bos: bool = False


def _bytes() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False)


def _digits_then_bytes() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _bytes()])


def _regex_then_bytes(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


_GPT2 = _WordRule(_bytes)
_SMOLLM = _WordRule(_digits_then_bytes)
_LLAMA_BPE = _WordRule(lambda: _regex_then_bytes(_LLAMA3), ignore_merges=True, add_bos=True)
_RULES = {
    "gpt-2": _GPT2,
    "smollm": _SMOLLM,
    "starcoder": _SMOLLM,
    "llama-bpe": _LLAMA_BPE,
    "llama3": _LLAMA_BPE,
    "llama-v3": _LLAMA_BPE,
    "qwen2": _WordRule(lambda: _regex_then_bytes(_QWEN2), normalizer=normalizers.NFC),
}


def build_tokenizer(metadata: Mapping[str, Any]) -> PreTrainedTokenizerFast:
    """A fast tokenizer from the `tokenizer.*` metadata. Raises WeightError for a kind that is not known here."""
    from transformers import PreTrainedTokenizerFast  # takes seconds to import, and weights alone do not need it

    values = {key.removeprefix("tokenizer.ggml."): value for key, value in metadata.items()}
    kind = values.get("model")
    if kind is None or "tokens" not in values:
        raise WeightError("the GGUF file holds no tokenizer: pass the path of one")
    if kind == "gpt2":
        backend = _byte_level(values)
    elif kind == "llama":
        backend = _sentence_piece(values)
    else:
        raise WeightError(f"the GGUF file has a tokenizer of kind {kind!r}, known are gpt2, llama: pass a path of one")
    tokens = values["tokens"]
    backend.add_tokens(_added(values, _USER_DEFINED))
    backend.add_special_tokens(_added(values, _CONTROL))
    roles = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    named = {role: values.get(f"{key}_token_id") for role, key in roles.items()}
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        chat_template=_chat_templates(metadata),
        clean_up_tokenization_spaces=False,
        **{role: tokens[number] for role, number in named.items() if number is not None},
    )


def _byte_level(values: Mapping[str, Any]) -> Tokenizer:
    name = values.get("pre", "default")
    if name not in _RULES:
        raise WeightError(
            f"the GGUF file splits words by the rule {name!r}, which is not known here (known: {', '.join(_RULES)}): "
            "pass the path of its tokenizer"
        )
    rule = _RULES[name]
    merges = [tuple(merge.split(" ")) for merge in values["merges"]]
    tokenizer = Tokenizer(models.BPE(_vocabulary(values), merges, ignore_merges=rule.ignore_merges))
    if rule.normalizer is not None:
        tokenizer.normalizer = rule.normalizer()
    tokenizer.pre_tokenizer = rule.split()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.Sequence(
        [processors.ByteLevel(trim_offsets=False), *_framing(values, rule.add_bos)]
    )
    return tokenizer


def _sentence_piece(values: Mapping[str, Any]) -> Tokenizer:
    vocabulary = _vocabulary(values)
    unknown = values["tokens"][values.get("unknown_token_id", 0)]
    prefix = values.get("add_space_prefix", True)
    tokenizer = Tokenizer(
        models.BPE(
            vocabulary,
            _merges_by_score(vocabulary, values["scores"]),
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    marks = [normalizers.Prepend(_UNDERLINE)] if prefix else []
    tokenizer.normalizer = normalizers.Sequence([*marks, normalizers.Replace(" ", _UNDERLINE)])
    strip = [decoders.Strip(" ", left=1, right=0)] if prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(_UNDERLINE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    framing = _framing(values, add_bos=True)
    if framing:
        tokenizer.post_processor = processors.Sequence(framing)
    return tokenizer


def _merges_by_score(vocabulary: Mapping[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """SentencePiece merges the pair whose union has the best score: as a ranked list of pairs.

    Unions of equal score (runs of spaces) are merged from the left, so that the longest left part goes first.
    """
    merges = [
        (-scores[number], -cut, vocabulary[token[:cut]], vocabulary[token[cut:]], token[:cut], token[cut:])
        for token, number in vocabulary.items()
        for cut in range(1, len(token))
        if token[:cut] in vocabulary and token[cut:] in vocabulary
    ]
    return [(left, right) for *_, left, right in sorted(merges)]


def _vocabulary(values: Mapping[str, Any]) -> dict[str, int]:
    tokens = values["tokens"]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    if len(vocabulary) < len(tokens):
        twice = len(tokens) - len(vocabulary)
        raise WeightError(f"{twice} tokens of the GGUF file come twice: pass the path of its tokenizer")
    return vocabulary


def _added(values: Mapping[str, Any], kind: int) -> list[AddedToken]:
    """Tokens that are found in the text before it is split."""
    return [
        AddedToken(token, special=kind == _CONTROL, normalized=False)
        for token, its_kind in zip(values["tokens"], values.get("token_type", []), strict=False)
        if its_kind == kind
    ]


def _framing(values: Mapping[str, Any], add_bos: bool) -> list[processors.PostProcessor]:
    """Puts bos and eos around a text where the file asks for it."""
    bos = values.get("bos_token_id") if values.get("add_bos_token", add_bos) else None
    eos = values.get("eos_token_id") if values.get("add_eos_token", False) else None
    if bos is None and eos is None:
        return []
    before, after = ([] if number is None else [values["tokens"][number]] for number in (bos, eos))
    single = [*before, "$A", *after]
    return [
        processors.TemplateProcessing(
            single=single,
            pair=[*single, *(f"{part}:1" for part in [*before, "$B", *after])],
            special_tokens=[(values["tokens"][number], number) for number in (bos, eos) if number is not None],
        )
    ]


def _chat_templates(metadata: Mapping[str, Any]) -> str | dict[str, str] | None:
    default = metadata.get("tokenizer.chat_template")
    named = {name: metadata[f"tokenizer.chat_template.{name}"] for name in metadata.get("tokenizer.chat_templates", [])}
    return {"default": default, **named} if named and default else default
