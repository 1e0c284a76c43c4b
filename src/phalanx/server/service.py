"""Service: what all routes share. The engine, the tokenizer, the metrics, and whether a new request is let in."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any, TypeVar

from phalanx.engine.guides import Guide, GuideCompiler
from phalanx.engine.opened_model import OpenedModel
from phalanx.engine.prompts import PromptReader
from phalanx.engine.sampling_params import SamplingParams
from phalanx.server.engine_client import EngineState
from phalanx.server.engine_messages import Ready
from phalanx.server.engines import Engines
from phalanx.server.errors import ApiError
from phalanx.server.metrics import Metrics
from phalanx.server.parsing import guess_formats, reasoning_formats, tool_formats
from phalanx.server.settings import ServerSettings
from phalanx.server.text_bound import TextBound
from phalanx.server.token_texts import TokenTexts
from phalanx.server.worker import Worker

_LONG_TEXT = 4000
"""Characters from which on a text is encoded in a thread; below, that costs more than it spares."""
_RETRY_SECONDS = "1"
Result = TypeVar("Result")


class Service:
    """One model behind one port.

    Args:
        settings: of the server.
        opened: the model, for its tokenizer.

    Raises:
        ValueError: a chat template, or the name of a format, that is none.
    """

    def __init__(self, settings: ServerSettings, opened: OpenedModel) -> None:
        self.settings = settings
        self.names = settings.names or (opened.name,)
        self.tokenizer = opened.tokenizer()
        if self.tokenizer is not None and settings.chat_template is not None:
            self.tokenizer.chat_template = settings.chat_template
            _check_template(self.tokenizer)
        self.engine = Engines(settings.model, settings.engine, settings.data_parallel, settings.restart)
        self.metrics = Metrics(self.names[0], self.engine)
        self.token_texts = TokenTexts(self.tokenizer) if self.tokenizer is not None else None
        self.tool_format, self.reasoning_format = _formats(settings, self.tokenizer)
        self.special_tokens = _special_tokens(self.tokenizer)
        self.draining = False
        self.open_answers = 0
        # A tokenizer must not be used by two threads at once: the thread has its own.
        self._thread = Worker("phalanx tokenizer")
        self._thread_tokenizer = copy.deepcopy(self.tokenizer)
        self._bound = TextBound(self.tokenizer)
        self._compiler: GuideCompiler | None = None

    @property
    def name(self) -> str:
        """What the model is called in answers."""
        return self.names[0]

    @property
    def ready(self) -> Ready:
        """What the engine said of itself.

        Raises:
            ApiError: 503 while there is no engine that could take a request.
        """
        said = self.engine.ready
        if self.engine.state is not EngineState.READY or said is None:
            raise unavailable(self.engine)
        return said

    def check_engine(self) -> None:
        """Raises ApiError 503 while there is no engine that could take a request."""
        if self.engine.state is not EngineState.READY:
            raise unavailable(self.engine)

    async def decode_long(self, token_ids: Sequence[int]) -> str:
        """``decode``, of any number of tokens."""
        if len(token_ids) < _LONG_TEXT or self.tokenizer is None:
            return self.decode(token_ids)
        tokenizer = self._thread_tokenizer
        return str(await self._thread.run(lambda: tokenizer.decode(token_ids, clean_up_tokenization_spaces=False)))

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of tokens, special ones included.

        Raises:
            ApiError: 400 for a model without tokenizer.
        """
        if self.tokenizer is None:
            raise ApiError(400, "this model has no tokenizer")
        return str(self.tokenizer.decode(token_ids, clean_up_tokenization_spaces=False))

    async def token_texts_of(self, token_ids: Sequence[int]) -> list[str]:
        """Each token of any number as a text.

        Raises:
            ApiError: 400 for a model without tokenizer.
        """
        if len(token_ids) < _LONG_TEXT:
            return [self.texts.escaped(token) for token in token_ids]
        return await self._thread.run(lambda: [self._thread_texts.escaped(token) for token in token_ids])

    @cached_property
    def _thread_texts(self) -> TokenTexts:
        return TokenTexts(self._thread_tokenizer)

    @property
    def texts(self) -> TokenTexts:
        """Single tokens as texts.

        Raises:
            ApiError: 400 for a model without tokenizer.
        """
        if self.token_texts is None:
            raise ApiError(400, "this model has no tokenizer")
        return self.token_texts

    def close(self) -> None:
        """Lets the tokenizer's thread go."""
        self._thread.close()

    # -- letting in

    def check_model(self, name: str) -> None:
        """Raises ApiError 404 for a model that is not served here."""
        if name not in self.names:
            raise ApiError(
                404, f"the model {name!r} is not served here: use {self.name!r}", param="model", code="model_not_found"
            )

    def check_open(self, answers: int) -> None:
        """Raises ApiError where a request for so many answers is not let in: 503 without engine or while draining, 429
        while the queue is too full for them, 400 where it always would be."""
        if self.draining:
            raise ApiError(503, "the server is shutting down", code="draining", headers={"Retry-After": "5"})
        places = self.ready.max_num_seqs
        limit = self.settings.max_queue
        if limit is None or self.open_answers + answers <= places + limit:
            return
        if answers > places + limit:
            raise ApiError(
                400,
                f"{answers} answers are asked for at once, and at most {places + limit} can run and wait here "
                "(--max-queue): ask for fewer",
            )
        raise ApiError(
            429,
            f"{max(0, self.open_answers - places)} answers are waiting, the limit is {limit}, and {answers} more were "
            "asked for: try again later",
            code="queue_full",
            headers={"Retry-After": _RETRY_SECONDS},
        )

    # -- prompts

    async def encode(self, prompt: str | list[int], param: str = "prompt") -> list[int]:
        """The checked token ids of a prompt, from the field that is named.

        Raises:
            ApiError: 400 where it is none.
        """
        if isinstance(prompt, str):
            self.check_size(prompt, param)
        else:
            self.check_length(prompt, param)
        size = len(prompt) if isinstance(prompt, str) else 0
        return await self._read(size, lambda reader: reader.ids(prompt), param)

    async def chat_text(self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> str:
        """A conversation as the chat template writes it.

        Raises:
            ApiError: 400 with the template's own message.
        """
        if not (options.get("chat_template") or getattr(self.tokenizer, "chat_template", None)):
            raise ApiError(
                400, "this model has no chat template: use /v1/completions, or start the server with --chat-template"
            )
        # A template takes time for all that it is given; one that a stranger has sent may take any: not here.
        size = _LONG_TEXT if "chat_template" in options else len(repr(messages)) + len(repr(options))
        return await self._read(size, lambda reader: reader.chat_text(messages, options), "messages")

    async def encode_plain(self, text: str, special: bool = False) -> list[int]:
        """The token ids of a text, unchecked."""
        return await self._read(len(text), lambda reader: reader.encode(text, special), "prompt")

    def check_size(self, text: str, param: str) -> None:
        """Raises ApiError 400 for a text that the context cannot hold, as its length alone says."""
        limit = self.ready.max_model_len
        if self._bound.exceeded(text, limit):
            reason = f"the prompt's {len(text)} characters are more than {limit} tokens, the limit, can be: shorten it"
            raise _too_long(ValueError(reason), param)

    def check_length(self, token_ids: Sequence[int], param: str) -> None:
        """Raises ApiError 400 for a prompt that the context cannot hold."""
        try:
            self._reader(self.tokenizer).check_length(len(token_ids))
        except ValueError as error:
            raise _too_long(error, param) from None

    async def check(self, token_ids: Sequence[int], params: SamplingParams, param: str, guide_field: str) -> None:
        """Raises ApiError 400 for what the engine could not honour: a prompt, from the field ``param``, that is too
        long, ids outside the vocabulary, a guide, from the field that is named, that cannot be used."""
        reader = self._reader(self.tokenizer)
        try:
            reader.max_tokens(len(token_ids), params)
        except ValueError as error:
            raise _too_long(error, param) from None
        try:
            reader.check(params)
        except ValueError as error:
            raise ApiError(400, str(error)) from None
        if params.guide is not None:
            await self._check_guide(params.guide, guide_field)

    async def _check_guide(self, guide: Guide, field: str) -> None:
        try:
            if self._compiler is None:
                ready = self.ready
                make = partial(GuideCompiler, self._thread_tokenizer, ready.vocab_size, ready.eos_token_ids)
                self._compiler = await self._thread.run(make)
            # Not in the tokenizer's thread: compiling may take seconds.
            await asyncio.to_thread(self._compiler.compile, guide)
        except ValueError as error:
            raise ApiError(400, str(error), param=field) from None

    async def _read(self, size: int, read: Callable[[PromptReader], Result], param: str) -> Result:
        try:
            if size >= _LONG_TEXT:
                return await self._thread.run(lambda: read(self._reader(self._thread_tokenizer)))
            return read(self._reader(self.tokenizer))
        except ValueError as error:
            raise ApiError(400, str(error), param=param) from None

    def _reader(self, tokenizer: Any) -> PromptReader:
        ready = self.ready
        return PromptReader(tokenizer, ready.vocab_size, ready.max_model_len)


def _check_template(tokenizer: Any) -> None:
    """Raises ValueError where the chat template is none; what it refuses is for each request to say."""
    from jinja2 import TemplateSyntaxError

    try:
        tokenizer.apply_chat_template([{"role": "user", "content": ""}], tokenize=False)
    except TemplateSyntaxError as error:
        raise ValueError(f"the chat template is no jinja template: {error.message}, line {error.lineno}") from None
    except Exception:
        return


def _formats(settings: ServerSettings, tokenizer: Any) -> tuple[str | None, str | None]:
    """How the model writes calls and reasoning: as the settings say, or as its template suggests."""
    template = getattr(tokenizer, "chat_template", None)
    template = template if isinstance(template, str) else ""
    tokens = _special_tokens(tokenizer)
    guessed = guess_formats(template, tokens) if tokenizer is not None else (None, None)
    asked = (settings.tool_format, settings.reasoning_format)
    tool, reasoning = (guess if given == "auto" else given for given, guess in zip(asked, guessed, strict=True))
    for option, given, known in (("tool", tool, tool_formats()), ("reasoning", reasoning, reasoning_formats())):
        if given is not None and given not in known:
            raise ValueError(f"unknown {option} format {given!r}: expected auto, none, {', '.join(known)}")
    return tool, reasoning


def _special_tokens(tokenizer: Any) -> dict[str, int]:
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return {str(token): place for place, token in added.items() if token.special}


def _too_long(error: ValueError, param: str) -> ApiError:
    """With the code that clients know it by, who may then shorten the prompt."""
    return ApiError(400, str(error), param=param, code="context_length_exceeded")


def unavailable(engine: Engines) -> ApiError:
    """503: why there is no engine now."""
    if engine.state is EngineState.STARTING:
        return ApiError(503, "the model is being loaded", code="starting", headers={"Retry-After": "5"})
    reason = engine.reason or "the server is shutting down"
    return ApiError(503, f"the engine has ended: {reason}", code="engine_dead", headers={"Retry-After": "5"})
