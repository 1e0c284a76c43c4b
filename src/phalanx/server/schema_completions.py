"""The request and the answer of /v1/completions."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import BaseModel, Field, model_validator

from phalanx.server.schema import Items, Sampling, TokenId
from phalanx.server.settings import MAX_PROMPTS

Ids = Annotated[list[TokenId], Items(min_length=1, max_length=2**20)]
Texts = Annotated[list[str], Items(min_length=1, max_length=MAX_PROMPTS)]
ManyIds = Annotated[list[Ids], Items(min_length=1, max_length=MAX_PROMPTS)]


class CompletionRequest(Sampling):
    """Texts, or token ids, to go on with."""

    HINTS: ClassVar[dict[str, str]] = {
        "suffix": "these models only go on from a prompt",
        "messages": "conversations go to /v1/chat/completions",
    }

    prompt: str | Texts | Ids | ManyIds
    echo: bool | None = None
    """The answer's text begins with the prompt."""
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    best_of: Annotated[int, Field(ge=1)] | None = None
    """Only equal to ``n``."""

    @model_validator(mode="after")
    def _answers(self) -> CompletionRequest:
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise ValueError(f"best_of={self.best_of} answers to choose from are not supported: leave it out, or use n")
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens=0 asks for nothing: set echo, or max_tokens >= 1")
        return self

    def prompts(self) -> list[str] | list[list[int]]:
        """All prompts."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        return [self.prompt] if isinstance(self.prompt[0], int) else self.prompt


class Usage(BaseModel):
    """Tokens of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: dict[str, int]


class Logprobs(BaseModel):
    """Log-probabilities of the model's raw logits; null where they are not finite, and for a text's first token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float | None] | None]
    text_offset: list[int]


class CompletionChoice(BaseModel):
    """One answer."""

    index: int
    text: str
    logprobs: Logprobs | None
    finish_reason: Literal["stop", "length"] | None
    stop_reason: int | str | None


class CompletionAnswer(BaseModel):
    """All answers."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage
