"""The request and the answer of /v1/embeddings."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import BaseModel, Field, StringConstraints

from phalanx.server.schema import ShortText, Strict
from phalanx.server.schema_completions import Ids, ManyIds, Texts


class EmbeddingRequest(Strict):
    """Texts, or token ids, to embed: the model's hidden states behind its last norm, pooled, of length 1."""

    HINTS: ClassVar[dict[str, str]] = {"prompt": "use input", "messages": "use input: a text, token ids, or a list"}

    model: Annotated[str, StringConstraints(max_length=1024)]
    input: str | Texts | Ids | ManyIds
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    """The first so many numbers, made 1 long again; only with ``truncate``, since models are seldom trained for it."""
    truncate: bool | None = None
    """Beyond OpenAI: ``dimensions`` may cut the embedding off."""
    pooling: Literal["last", "mean"] | None = None
    """Beyond OpenAI: the last token's state (default), or the mean of all."""
    user: ShortText | None = None
    cache_salt: ShortText | None = None

    def inputs(self) -> list[str] | list[list[int]]:
        """All of them."""
        if isinstance(self.input, str):
            return [self.input]
        return [self.input] if isinstance(self.input[0], int) else self.input


class Embedding(BaseModel):
    """One input's: numbers, or their float32 bytes (little-endian) in base64."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingUsage(BaseModel):
    """Tokens of a request."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingAnswer(BaseModel):
    """In the order of the inputs."""

    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage
