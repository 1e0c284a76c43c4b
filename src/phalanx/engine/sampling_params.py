"""SamplingParams: how one request's answer is drawn and when it ends."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from phalanx.config import ConfigError, explain
from phalanx.engine.guides import Guide

MAX_LOGPROBS = 20


class SamplingParams(BaseModel):
    """Settings of one request. Every field is honoured; one that cannot be is refused.

    The order is transformers': penalties, bias, bad words and minimum length, then temperature, top-k, top-p, min-p.
    Log-probabilities are of the model's raw logits, before all of these.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    max_tokens: int | None = Field(default=None, ge=0)
    """Longest answer in tokens; None: the rest of the context; 0: only with ``prompt_logprobs``."""
    min_tokens: int = Field(default=0, ge=0)
    """End tokens cannot come before."""
    temperature: float = Field(default=0.0, ge=0, le=100)
    """0 takes the likeliest token."""
    top_k: int = Field(default=0, ge=0)
    """Draw among the k likeliest; 0: all."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Draw among the fewest likeliest tokens that together reach this probability."""
    min_p: float = Field(default=0.0, ge=0, le=1)
    """Draw among tokens at least this fraction as likely as the likeliest."""
    repetition_penalty: float = Field(default=1.0, gt=0, le=100)
    """Divides (multiplies, if negative) the logits of tokens of prompt and answer."""
    presence_penalty: float = Field(default=0.0, ge=-10, le=10)
    """Subtracted from the logits of tokens of the answer."""
    frequency_penalty: float = Field(default=0.0, ge=-10, le=10)
    """Subtracted for every time that a token is in the answer."""
    logit_bias: dict[int, float] = Field(default_factory=dict)
    """Added to the logits, by token id."""
    bad_words: tuple[str, ...] = ()
    """Texts whose tokens (with and without a space before) never come in that order."""
    seed: int | None = Field(default=None, ge=0, lt=2**63)
    """The same seed draws the same tokens, whatever else runs."""
    n: int = Field(default=1, ge=1, le=128)
    """Answers to the one prompt."""
    logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    """Log-probability of each token, and of this many likeliest."""
    prompt_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    """The same for the prompt's tokens (the first has none)."""
    stop: tuple[str, ...] = ()
    """Texts that end the answer; not part of it."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end the answer, beside the model's own end tokens."""
    include_stop: bool = False
    """Leave the stop text or end token's text in the answer."""
    ignore_eos: bool = False
    """Go on after the model's own end tokens."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    guide: Guide | None = None
    """What the answer must look like; its tokens are drawn among those that go on with it. An answer that is complete
    ends, whatever ``min_tokens`` says; with ``ignore_eos`` only then."""

    @field_validator("stop", "bad_words", mode="before")
    @classmethod
    def _one_or_many(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

    @field_validator("stop", "bad_words")
    @classmethod
    def _no_empty_text(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if any(not text for text in value):
            raise ValueError("an empty text is everywhere; leave it out")
        return value

    @model_validator(mode="after")
    def _consistent(self) -> SamplingParams:
        if self.max_tokens == 0 and self.prompt_logprobs is None:
            raise ValueError("max_tokens=0 asks for nothing: set prompt_logprobs, or max_tokens >= 1")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens={self.min_tokens} is above max_tokens={self.max_tokens}")
        if self.n > 1 and self.temperature == 0:
            raise ValueError(f"n={self.n} answers at temperature 0 would be the same: set a temperature above 0")
        if any(not -100 <= bias <= 100 for bias in self.logit_bias.values()):
            raise ValueError("logit_bias goes from -100 to 100")
        return self

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0


def sampling_params(params: SamplingParams | dict[str, Any] | None = None, **overrides: Any) -> SamplingParams:
    """SamplingParams from an object, a dict or keywords (keywords win).

    Raises:
        ConfigError: listing every fault by field.
    """
    if isinstance(params, SamplingParams) and not overrides:
        return params
    given = params.model_dump(exclude_unset=True) if isinstance(params, SamplingParams) else dict(params or {})
    try:
        return SamplingParams(**{**given, **overrides})
    except ValidationError as error:
        raise ConfigError(explain(error, SamplingParams)) from None
