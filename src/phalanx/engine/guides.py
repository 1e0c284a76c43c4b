"""Guides: what an answer must look like, and the matchers that say which tokens may come next.

The work is llguidance's (https://github.com/guidance-ai/llguidance): a parser over the bytes of the tokenizer's tokens.
Here are the bounds on what a stranger may ask of it, and one matcher an answer.
"""

from __future__ import annotations

import json
import os
import threading
from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, field_validator

from phalanx.engine.guide_limits import check_grammar, check_schema, check_size, parse_json

COMPILE_SECONDS = 10.0
"""A guide that takes longer to compile is refused."""
_COMPILE_STACK = 512 << 20
"""Bytes of stack for compiling, which goes as deep as rules name one another; memory only where it is used."""
_CACHED = 128
_ONE_SPACE = " ?"
"""Whitespace between JSON tokens: with any amount of it, a model may go on with nothing else."""


class Guide(BaseModel):
    """What an answer must look like.

    Attributes:
        kind: "json_object" (any JSON object), "json_schema", "regex" (of the Rust regex crate, the whole answer;
            neither look-around nor back-references), "grammar" (llguidance's dialect of Lark), "choice".
        text: nothing for "json_object"; the schema or the list of strings as JSON (or as the object itself); the regex;
            the grammar.
        after: where it is given, the answer is free until this text has come, and cannot end before: ``</think>`` lets
            a model think first.

    Raises:
        ValueError: an unknown kind, or a text that the kind does not take. ``GuideCompiler`` says whether the text is
            one that can be used.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Literal["json_object", "json_schema", "regex", "grammar", "choice"]
    text: str = Field(default="", validate_default=True)
    after: str = Field(default="", max_length=64)

    @field_validator("text", mode="before")
    @classmethod
    def _as_text(cls, value: Any) -> Any:
        return json.dumps(value) if isinstance(value, (dict, list, tuple)) else value

    @field_validator("text")
    @classmethod
    def _sized(cls, value: str, info: Any) -> str:
        kind = info.data.get("kind")
        if kind == "json_object" and value:
            raise ValueError('a guide of kind "json_object" takes no text: use "json_schema"')
        if kind not in (None, "json_object") and not value:
            raise ValueError(f'a guide of kind "{kind}" needs a text')
        check_size(value)
        return value


@dataclass(frozen=True)
class _Vocabulary:
    """A tokenizer as llguidance reads it, its end tokens (a stand-in unless it ``has_ends``), and the int32 numbers of
    a mask."""

    tokenizer: Any
    end_ids: tuple[int, ...]
    has_ends: bool
    words: int


class CompiledGuide:
    """A guide that is ready for any number of answers."""

    def __init__(self, template: Any, after: str, vocabulary: _Vocabulary) -> None:
        self._template = template
        self._after = after.encode()
        self._vocabulary = vocabulary

    def matcher(self, ends_allowed: bool = True) -> GuideMatcher:
        """A matcher for one answer; without ``ends_allowed`` the answer goes on until nothing more can come."""
        return GuideMatcher(self._template.deep_copy(), ends_allowed, self._after, self._vocabulary)


class GuideMatcher:
    """Where one answer is in its guide.

    Args:
        matcher: llguidance's.
        ends_allowed: whether an end token may come where the guide accepts.
        after: what must come before the guide begins.
        vocabulary: of the tokenizer.

    Attributes:
        begun: whether ``after`` has come.
    """

    def __init__(self, matcher: Any, ends_allowed: bool, after: bytes, vocabulary: _Vocabulary) -> None:
        self.matcher = matcher
        self.vocabulary = vocabulary
        self.begun = not after
        self._after = after
        self._recent = b""
        self._forbidden = () if ends_allowed and vocabulary.has_ends else vocabulary.end_ids

    @property
    def error(self) -> str | None:
        """Why it cannot go on, if so."""
        return _reason(self.matcher.get_error()) if self.matcher.is_error() else None

    @property
    def complete(self) -> bool:
        """Whether the answer is one that the guide accepts, and nothing more can come."""
        return bool(self.matcher.is_stopped()) and not self.matcher.is_error()

    def advance(self, token: int) -> None:
        """The answer has gained a token that is not its end; ``error`` tells if the guide does not accept it."""
        if self.begun:
            self.matcher.consume_token(token)
            return
        self._recent += self.vocabulary.tokenizer.decode_bytes([token])
        self.begun = self._after in self._recent
        self._recent = self._recent[-len(self._after) :]

    def forbid_ends(self, mask: np.ndarray[Any, Any]) -> None:
        """Takes end tokens out of a mask, int32 [words], where they must not come."""
        for token in self._forbidden if self.begun else self.vocabulary.end_ids:
            mask.view(np.uint32)[token // 32] &= ~np.uint32(1 << (token % 32))


def token_masks(matchers: Sequence[GuideMatcher], vocab_size: int) -> np.ndarray[Any, Any]:
    """Which tokens each answer may go on with, int32 [len(matchers), ceil(vocab_size / 32)]; token t is bit t % 32 of
    number t // 32. Rows of matchers that turn out to have an ``error``, or to be ``complete``, say nothing."""
    import llguidance.numpy

    masks = np.full((len(matchers), matchers[0].vocabulary.words), -1, dtype=np.int32)
    tasks = [(matcher.matcher, row) for row, matcher in enumerate(matchers) if matcher.begun]
    if len(tasks) == 1:
        llguidance.numpy.fill_next_token_bitmask(tasks[0][0], masks, tasks[0][1])
    elif tasks:
        llguidance.numpy.fill_next_token_bitmask_par(_threads(), tasks, masks)
    for matcher, mask in zip(matchers, masks, strict=True):
        matcher.forbid_ends(mask)
    return masks[:, : -(-vocab_size // 32)]


class GuideCompiler:
    """Compiles guides for one tokenizer and keeps the latest. For use from any thread.

    Args:
        tokenizer: a fast tokenizer of transformers.
        vocab_size: of the model's logits, where that is more than the tokenizer's: ids beyond never come.
        end_ids: what ends an answer; default: the tokenizer's.

    Raises:
        ValueError: llguidance is not installed, or the tokenizer is not one that it can read.
    """

    def __init__(self, tokenizer: Any, vocab_size: int = 0, end_ids: Collection[int] | None = None) -> None:
        self._vocabulary = _read_tokenizer(tokenizer, vocab_size, end_ids)
        self._lock = threading.Lock()
        self._cache: OrderedDict[Guide, CompiledGuide] = OrderedDict()

    def knows(self, guide: Guide) -> bool:
        """Whether ``compile`` would have it at once."""
        with self._lock:
            return guide in self._cache

    def compile(self, guide: Guide) -> CompiledGuide:
        """A guide ready for use.

        Raises:
            ValueError: it is malformed, too large, unsatisfiable, or takes too long; with the reason.
        """
        with self._lock:
            if guide in self._cache:
                self._cache.move_to_end(guide)
                return self._cache[guide]
        compiled = CompiledGuide(_in_large_stack(self._template, guide), guide.after, self._vocabulary)
        with self._lock:
            self._cache[guide] = compiled
            while len(self._cache) > _CACHED:
                self._cache.popitem(last=False)
        return compiled

    def _template(self, guide: Guide) -> Any:
        import llguidance

        limits = llguidance.LLParserLimits(
            initial_lexer_fuel=1_000_000, max_grammar_size=200_000, max_lexer_states=30_000, verbose_errors=False
        )
        matcher = llguidance.LLMatcher(self._vocabulary.tokenizer, _grammar_of(guide), log_level=0, limits=limits)
        if not matcher.is_error():
            # Some faults show only where the first token is looked for.
            matcher.compute_bitmask()
        if matcher.is_error():
            raise ValueError(f"{_NAMES[guide.kind]} cannot be used: {_reason(matcher.get_error())}")
        return matcher


_NAMES = {
    "json_object": "a JSON object",
    "json_schema": "the JSON schema",
    "regex": "the regular expression",
    "grammar": "the grammar",
    "choice": "the choice",
}


def _grammar_of(guide: Guide) -> str:
    """The guide in llguidance's own form."""
    from llguidance import LLMatcher

    if guide.kind in ("json_object", "json_schema"):
        schema = {"type": "object"} if guide.kind == "json_object" else parse_json(guide.text, "the JSON schema")
        check_schema(schema)
        grammar = LLMatcher.grammar_from_json_schema(json.dumps(schema), defaults={"whitespace_pattern": _ONE_SPACE})
    elif guide.kind == "regex":
        grammar = LLMatcher.grammar_from_regex(guide.text)
    elif guide.kind == "grammar":
        check_grammar(guide.text)
        grammar = LLMatcher.grammar_from_lark(guide.text)
    else:
        choices = parse_json(guide.text, "the choice")
        if not isinstance(choices, list) or not choices or not all(isinstance(one, str) and one for one in choices):
            raise ValueError("a choice is a list of texts, none of them empty")
        grammar = LLMatcher.grammar_from_lark("start: " + " | ".join(map(json.dumps, dict.fromkeys(choices))))
    return str(grammar)


def _read_tokenizer(tokenizer: Any, vocab_size: int, end_ids: Collection[int] | None) -> _Vocabulary:
    try:
        import llguidance.hf
    except ImportError:
        raise ValueError(
            "structured output needs llguidance, which is not installed: pip install 'phalanx[guides]'"
        ) from None
    known = len(tokenizer)
    own = tokenizer.eos_token_id
    wanted = end_ids if end_ids is not None else () if own is None else (own,)
    ends = sorted(value for value in wanted if 0 <= value < known)
    # llguidance must have an end token. A stand-in is never allowed: an answer ends then once it is complete.
    given = ends or [*tokenizer.all_special_ids, known - 1][:1]
    try:
        read = llguidance.hf.from_tokenizer(tokenizer, n_vocab=max(vocab_size, known), eos_token=given)
    except Exception as error:
        kind = type(tokenizer).__name__
        raise ValueError(f"structured output cannot read this model's tokenizer ({kind}): {error}") from error
    return _Vocabulary(read, tuple(given), bool(ends), -(-max(vocab_size, known) // 32))


def _in_large_stack(work: Any, argument: Any) -> Any:
    """A call in a thread of its own: llguidance descends as deep as rules name one another, and cannot be stopped."""
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append((work(argument), None))
        except BaseException as error:
            outcome.append((None, error))

    with _stack_lock:
        before = threading.stack_size(_COMPILE_STACK)
        try:
            thread = threading.Thread(target=run, name="phalanx guide", daemon=True)
            thread.start()
        finally:
            threading.stack_size(before)
    thread.join(COMPILE_SECONDS)
    if not outcome:
        raise ValueError(f"it takes more than {COMPILE_SECONDS:g} seconds to compile this guide: make it simpler")
    result, error = outcome[0]
    if error is not None:
        raise error
    return result


_stack_lock = threading.Lock()
_executor: list[Any] = []


def _threads() -> Any:
    """llguidance's threads, the same for all batches."""
    from llguidance import LLExecutor

    if not _executor:
        _executor.append(LLExecutor(num_threads=min(8, len(os.sched_getaffinity(0)))))
    return _executor[0]


def _reason(text: str) -> str:
    """llguidance's words, without what it says of its own state."""
    if text.startswith("NoExtension"):
        return "no text satisfies it"
    return " ".join(text.replace("<non-verbose/>", "").split())[:500]
