"""What completions and chat completions have in common: how answers are drawn, and how they come.

Every field is honoured; others are refused by name. A null is as good as an absent field.
"""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints, model_validator

from phalanx.config import ConfigError
from phalanx.engine.guides import Guide
from phalanx.engine.sampling_params import SamplingParams, sampling_params
from phalanx.server.errors import ApiError

Items = partial(Field, fail_fast=True)
"""Of every list: its first fault is enough, where each of millions would take its time and memory."""


def encodable(text: str) -> str:
    """The text. Raises ValueError for half a character."""
    text.encode()
    return text


StopText = Annotated[str, StringConstraints(min_length=1, max_length=256)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
ShortText = Annotated[str, StringConstraints(max_length=256), AfterValidator(encodable)]
BiasKey = Annotated[str, StringConstraints(pattern=r"^(0|[1-9][0-9]{0,8})$")]


class Strict(BaseModel):
    """No field that is not known, no NaN."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, frozen=True)

    HINTS: ClassVar[dict[str, str]] = {}
    """What to do instead, for fields that clients know from elsewhere."""


class StreamOptions(Strict):
    """How a stream comes."""

    include_usage: bool | None = None


class JSONSchema(Strict):
    """A schema with the name that OpenAI's clients give it."""

    name: Annotated[str, StringConstraints(max_length=256)] | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Strict):
    """Text, any JSON object, or JSON of a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JSONSchema | None = None

    @model_validator(mode="after")
    def _consistent(self) -> ResponseFormat:
        schema = self.json_schema.schema_ if self.json_schema is not None else None
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError('json_schema belongs to type "json_schema", and only there')
        if self.type == "json_schema" and schema is None:
            raise ValueError("json_schema needs a schema")
        return self

    def guide(self) -> Guide | None:
        """What the answer must look like; None for text."""
        if self.type == "text":
            return None
        if self.json_schema is None or self.json_schema.schema_ is None:
            return Guide(kind="json_object")
        return Guide(kind="json_schema", text=self.json_schema.schema_)  # type: ignore[arg-type]


class StructuredOutputs(Strict):
    """What the answer must look like, by one of these; beyond OpenAI."""

    json_: dict[str, Any] | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: Annotated[list[str], Items(min_length=1, max_length=1024)] | None = None
    grammar: str | None = None
    json_object: Literal[True] | None = None

    @model_validator(mode="after")
    def _one(self) -> StructuredOutputs:
        given = [name for name in type(self).model_fields if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError("give one of json, regex, choice, grammar and json_object")
        return self

    def guide(self) -> Guide:
        if self.json_ is not None:
            return Guide(kind="json_schema", text=self.json_)  # type: ignore[arg-type]
        if self.regex is not None:
            return Guide(kind="regex", text=self.regex)
        if self.choice is not None:
            return Guide(kind="choice", text=self.choice)  # type: ignore[arg-type]
        return Guide(kind="grammar", text=self.grammar) if self.grammar is not None else Guide(kind="json_object")


class Sampling(Strict):
    """How answers are drawn."""

    model: Annotated[str, StringConstraints(max_length=1024)]
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    """1 where it is not given, as for OpenAI."""
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    max_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    min_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    stop: StopText | Annotated[list[StopText], Items(max_length=32)] | None = None
    stop_token_ids: Annotated[list[TokenId], Items(max_length=1024)] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    bad_words: Annotated[list[StopText], Items(max_length=128)] | None = None
    presence_penalty: Annotated[float, Field(ge=-10, le=10)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-10, le=10)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    logit_bias: Annotated[dict[BiasKey, Annotated[float, Field(ge=-100, le=100)]], Field(max_length=1024)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    user: ShortText | None = None
    """Stands in the log."""
    cache_salt: ShortText | None = None
    """Only requests of the same salt share cached prompts."""

    @model_validator(mode="after")
    def _streamed(self) -> Sampling:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options belong to stream=true")
        if self.structured_outputs is not None and self.response_format is not None:
            raise ValueError("structured_outputs and response_format both say what the answer looks like: give one")
        return self

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def guide_field(self) -> str:
        """Which field says what the answer looks like."""
        return "response_format" if self.structured_outputs is None else "structured_outputs"

    def guide(self) -> Guide | None:
        """What the answer must look like.

        Raises:
            ApiError: 400 for what can be no guide.
        """
        try:
            if self.structured_outputs is not None:
                return self.structured_outputs.guide()
            return self.response_format.guide() if self.response_format is not None else None
        except ValueError as error:
            raise ApiError(400, f"{self.guide_field}: {_reasons(error)}", param=self.guide_field) from None

    def params(self, **more: Any) -> SamplingParams:
        """The engine's settings; ``more`` wins.

        Raises:
            ApiError: 400 for settings that contradict each other.
        """
        given = {
            "n": self.n,
            "temperature": 1.0 if self.temperature is None else self.temperature,
            "top_p": self.top_p,
            "top_k": None if self.top_k is None else max(self.top_k, 0),
            "min_p": self.min_p,
            "max_tokens": self.max_tokens,
            "min_tokens": self.min_tokens,
            "stop": self.stop,
            "stop_token_ids": self.stop_token_ids,
            "include_stop": self.include_stop_str_in_output,
            "ignore_eos": self.ignore_eos,
            "skip_special_tokens": self.skip_special_tokens,
            "bad_words": self.bad_words,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "repetition_penalty": self.repetition_penalty,
            "logit_bias": None if self.logit_bias is None else {int(k): v for k, v in self.logit_bias.items()},
            # OpenAI's seeds may be negative.
            "seed": None if self.seed is None else self.seed % 2**63,
            **more,
        }
        try:
            return sampling_params({name: value for name, value in given.items() if value is not None})
        except ConfigError as error:
            raise ApiError(400, str(error).removeprefix("SamplingParams: ")) from None


def _reasons(error: ValueError) -> str:
    from pydantic import ValidationError

    if isinstance(error, ValidationError):
        return "; ".join(fault["msg"].removeprefix("Value error, ") for fault in error.errors())
    return str(error)
