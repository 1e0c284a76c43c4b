"""RequestMaker: checks a prompt and its settings, and makes the requests that run for it."""

from __future__ import annotations

import itertools
import random
import secrets
from collections.abc import Iterable, Sequence
from typing import Any

from phalanx.config import EngineConfig
from phalanx.engine.guides import GuideCompiler, GuideMatcher
from phalanx.engine.inference_engine import InferenceEngine
from phalanx.engine.pooling import check_pooling
from phalanx.engine.prompts import PromptReader
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
        self.prompts = PromptReader(tokenizer, engine.model.vocab_size, engine.max_model_len)
        self.tokenizer = tokenizer
        self._vocabulary = Vocabulary(tokenizer) if tokenizer is not None else None
        # Ids that the model has no logits for can never come.
        vocab_size = engine.model.vocab_size
        self.eos_ids = frozenset(value for value in eos_ids if 0 <= value < vocab_size)
        self._salt = config.cache_salt
        self._seeds = random.Random(config.seed) if config.seed is not None else secrets.SystemRandom()
        self._sequence_ids = itertools.count()
        self._guides: GuideCompiler | None = None

    @property
    def guides(self) -> GuideCompiler:
        """Compiles guides; made when it is first asked for, which takes a second where the vocabulary is large.

        Raises:
            ValueError: there is no tokenizer, or none that guides can read.
        """
        if self._guides is None:
            if self.tokenizer is None:
                raise ValueError("a guide is about text, and this model has no tokenizer")
            self._guides = GuideCompiler(self.tokenizer, self.engine.model.vocab_size, self.eos_ids)
        return self._guides

    def make(
        self, name: str, prompt: str | Sequence[int], params: SamplingParams, cache_salt: str, pooling: str = ""
    ) -> RequestGroup:
        """The ``n`` requests of a prompt; the first computes it, the others share it. With ``pooling``, the one that
        gives its embedding, and ``params`` have no say.

        Raises:
            ValueError: an empty or too long prompt, ids outside the vocabulary, settings that this model or engine
                cannot honour.
        """
        ids = self.prompts.ids(prompt)
        if pooling:
            return self._embedding(name, prompt, ids, cache_salt, pooling)
        max_tokens = self.prompts.max_tokens(len(ids), params)
        self.prompts.check(params)
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
                    guide=self._matcher(params),
                    parent=requests[0] if requests else None,
                    text=self._text(params),
                )
            )
        return RequestGroup(name, prompt if isinstance(prompt, str) else None, requests, self.tokenizer)

    def _embedding(
        self, name: str, prompt: str | Sequence[int], ids: list[int], cache_salt: str, pooling: str
    ) -> RequestGroup:
        check_pooling(pooling)
        self.prompts.check_length(len(ids))
        request = Request(
            seq_id=next(self._sequence_ids),
            tokens=ids,
            prompt_len=len(ids),
            blocks=self.engine.kv.new_blocks(),
            root=f"{len(self._salt)}:{self._salt}{cache_salt}",
            request_id=name,
            pooling=pooling,
        )
        return RequestGroup(name, prompt if isinstance(prompt, str) else None, [request], self.tokenizer)

    def _bad_words(self, words: Iterable[str]) -> Iterable[tuple[int, ...]]:
        seen = set()
        for word in words:
            # Tokenizers spell a word otherwise at the beginning of a text than behind a space.
            for text in (word, f" {word.lstrip()}"):
                ids = tuple(self.prompts.encode(text))
                possible = bool(ids) and max(ids) < self.engine.model.vocab_size
                if possible and ids not in seen:
                    seen.add(ids)
                    yield ids

    def _matcher(self, params: SamplingParams) -> GuideMatcher | None:
        if params.guide is None:
            return None
        return self.guides.compile(params.guide).matcher(ends_allowed=not params.ignore_eos)

    def _text(self, params: SamplingParams) -> TextStream | None:
        if self._vocabulary is None:
            return None
        return TextStream(
            self._vocabulary, params.stop, params.include_stop, params.skip_special_tokens, params.min_tokens
        )
