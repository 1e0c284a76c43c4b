"""RequestMaker: checks a prompt and its settings, and makes the requests that run for it."""

from __future__ import annotations

import itertools
import random
import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from phalanx.config import EngineConfig
from phalanx.engine.inference_engine import InferenceEngine, as_id, check_ids
from phalanx.engine.request_group import RequestGroup
from phalanx.engine.sampling_params import SamplingParams
from phalanx.engine.sequence import Request
from phalanx.engine.text import TextStream, Vocabulary


class RequestMaker:
    """Makes groups of requests for one engine.

    Args:
        tokenizer: None for an engine that takes and gives token ids only.
        eos_ids: the model's end tokens.
        config: for the seed and the cache salt.
    """

    def __init__(self, engine: InferenceEngine, tokenizer: Any, eos_ids: Iterable[int], config: EngineConfig) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self._vocabulary = Vocabulary(tokenizer) if tokenizer is not None else None
        # Ids that the model has no logits for can never come.
        vocab_size = engine.model.vocab_size
        self.eos_ids = frozenset(value for value in eos_ids if 0 <= value < vocab_size)
        self._salt = config.cache_salt
        self._seeds = random.Random(config.seed) if config.seed is not None else secrets.SystemRandom()
        self._sequence_ids = itertools.count()

    def make(self, name: str, prompt: str | Sequence[int], params: SamplingParams, cache_salt: str) -> RequestGroup:
        """The ``n`` requests of a prompt; the first computes it, the others share it.

        Raises:
            ValueError: an empty or too long prompt, ids outside the vocabulary, settings that this model or engine
                cannot honour.
        """
        ids = self._prompt_ids(prompt)
        limit = self.engine.max_model_len
        max_tokens = self._max_tokens(len(ids), limit, params)
        self._check(params)
        stop_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self.eos_ids)
        bad_words = tuple(self._bad_words(params.bad_words))
        seed = params.seed if params.seed is not None else self._seeds.getrandbits(62)
        requests: list[Request] = []
        for index in range(params.n):
            own = params if index == 0 else params.model_copy(update={"prompt_logprobs": None})
            requests.append(
                Request(
                    seq_id=next(self._sequence_ids),
                    tokens=list(ids),
                    prompt_len=len(ids),
                    blocks=self.engine.kv.new_blocks(),
                    root=f"{len(self._salt)}:{self._salt}{cache_salt}",
                    request_id=name,
                    params=own,
                    max_tokens=max_tokens,
                    index=index,
                    seed=(seed + index) % 2**63,
                    stop_ids=stop_ids,
                    bad_words=bad_words,
                    parent=requests[0] if requests else None,
                    text=self._text(params),
                )
            )
        return RequestGroup(name, prompt if isinstance(prompt, str) else None, requests, self.tokenizer)

    def chat_ids(self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> list[int]:
        """The prompt of a conversation by the model's chat template, which owns all special tokens.

        Raises:
            ValueError: no template, or messages that it does not take.
        """
        if self.tokenizer is None or not getattr(self.tokenizer, "chat_template", None):
            raise ValueError("this model has no chat template: use generate with a text")
        if not messages:
            raise ValueError("a conversation without messages: give one at least")
        for message in messages:
            if not isinstance(message, Mapping) or "role" not in message:
                raise ValueError(f"a message is a dict with 'role' and 'content', given {message!r}")
        arguments = {"add_generation_prompt": True, **options}
        try:
            text = self.tokenizer.apply_chat_template(list(messages), tokenize=False, **arguments)
        except Exception as error:
            # Whatever a template raises (jinja errors, its own raise_exception) is about these messages.
            raise ValueError(f"the chat template refuses these messages: {error}") from error
        return self._encode(text, special=False)

    def _encode(self, text: str, special: bool) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"the text holds half a character, which cannot be encoded: {error}") from None
        return list(self.tokenizer(text, add_special_tokens=special)["input_ids"])

    def _prompt_ids(self, prompt: Any) -> list[int]:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ValueError("this model has no tokenizer: give token ids, or pass tokenizer=")
            ids = self._encode(prompt, special=True)
            bos = self.tokenizer.bos_token_id
            # A text that begins with the BOS token and a tokenizer that adds it: one is enough.
            ids = ids[1:] if bos is not None and ids[:2] == [bos, bos] else ids
            if not ids:
                raise ValueError("the prompt is empty: this model's tokenizer makes no token of it")
        elif isinstance(prompt, Sequence):
            ids = [as_id(value) for value in prompt]
        else:
            raise ValueError(f"a prompt is a text or a list of token ids, given a {type(prompt).__name__}")
        check_ids(ids, self.engine.model.vocab_size, "the prompt")
        return ids

    @staticmethod
    def _max_tokens(prompt_len: int, limit: int, params: SamplingParams) -> int:
        needed = 0 if params.max_tokens == 0 else 1
        if prompt_len + needed > limit:
            raise ValueError(f"the prompt has {prompt_len} tokens, with an answer the limit is {limit}: shorten it")
        rest = limit - prompt_len
        if params.max_tokens is None:
            if params.min_tokens > rest:
                raise ValueError(f"min_tokens={params.min_tokens}, but only {rest} tokens of the context are left")
            return rest
        if params.max_tokens > rest:
            raise ValueError(
                f"the prompt's {prompt_len} tokens and max_tokens={params.max_tokens} are above the context of {limit}"
            )
        return params.max_tokens

    def _check(self, params: SamplingParams) -> None:
        vocab = self.engine.model.vocab_size
        for field, ids in (("logit_bias", params.logit_bias), ("stop_token_ids", params.stop_token_ids)):
            wrong = [value for value in ids if not 0 <= value < vocab]
            if wrong:
                raise ValueError(f"{field}: token id {wrong[0]} is outside the vocabulary of {vocab}")
        if self.tokenizer is None and (params.stop or params.bad_words):
            raise ValueError("stop and bad_words are texts, and this model has no tokenizer: use token ids")

    def _bad_words(self, words: Iterable[str]) -> Iterable[tuple[int, ...]]:
        seen = set()
        for word in words:
            # Tokenizers spell a word otherwise at the beginning of a text than behind a space.
            for text in (word, f" {word.lstrip()}"):
                ids = tuple(self._encode(text, special=False))
                possible = bool(ids) and max(ids) < self.engine.model.vocab_size
                if possible and ids not in seen:
                    seen.add(ids)
                    yield ids

    def _text(self, params: SamplingParams) -> TextStream | None:
        if self._vocabulary is None:
            return None
        return TextStream(
            self._vocabulary, params.stop, params.include_stop, params.skip_special_tokens, params.min_tokens
        )
