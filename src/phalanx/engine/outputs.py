"""What a request gives back."""

from __future__ import annotations

import msgspec


class CompletionOutput(msgspec.Struct):
    """One answer.

    Attributes:
        index: which of the ``n``.
        text: without stop text and end token, unless ``include_stop``.
        token_ids: everything that was generated, an end token included.
        logprobs: a token -> log-probability dict a token, the token's own first; None unless asked for. A value is None
            where the log-probability is not finite.
        finish_reason: "stop", "length", "abort" or "error"; None while it runs.
        stop_reason: the end token id or stop text.
        error: what went wrong, for "error".
    """

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[dict[int, float | None]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None


class RequestOutput(msgspec.Struct):
    """All answers to one prompt.

    Attributes:
        prompt: its text, None where ids were given.
        prompt_logprobs: None for the first token; the whole None unless asked for.
        cached_tokens: leading prompt tokens whose KV was found in the prefix cache.
        embedding: of a prompt that asked for its own instead of an answer, of length 1.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[dict[int, float | None] | None] | None = None
    cached_tokens: int = 0
    embedding: list[float] | None = None

    @property
    def text(self) -> str:
        """The first answer's text."""
        return self.outputs[0].text

    @property
    def finished(self) -> bool:
        return all(output.finish_reason is not None for output in self.outputs)


class Chunk(msgspec.Struct):
    """What one answer has gained since the last chunk of it: texts, joined, are the final text; ids too.

    Attributes:
        index: which of the ``n`` answers.
        finish_reason, stop_reason, error: as in CompletionOutput, in the last chunk.
    """

    request_id: str
    index: int
    text: str
    token_ids: list[int]
    logprobs: list[dict[int, float | None]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None
