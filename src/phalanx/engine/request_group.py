"""RequestGroup: the n answers to one prompt, as the caller sees them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from phalanx.engine.outputs import Chunk, CompletionOutput, RequestOutput
from phalanx.engine.pooling import unit
from phalanx.engine.sequence import Request, Status


class RequestGroup:
    """The requests that run for one prompt.

    Args:
        request_id: the caller's name.
        prompt: its text, None where ids were given.
        requests: one an answer, by index.
        tokenizer: None where there is none.
    """

    def __init__(self, request_id: str, prompt: str | None, requests: list[Request], tokenizer: Any) -> None:
        self.request_id = request_id
        self.prompt = prompt
        self.requests = requests
        self.tokenizer = tokenizer
        self._taken = [0] * len(requests)
        self._said_end = [False] * len(requests)

    @property
    def finished(self) -> bool:
        # Asked of every request in every step: a loop costs a third of a generator.
        for request in self.requests:  # noqa: SIM110
            if request.status is not Status.FINISHED:
                return False
        return True

    def output(self) -> RequestOutput:
        """All answers as far as they are."""
        first = self.requests[0]
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=first.tokens[: first.prompt_len],
            outputs=[self._completion(request) for request in self.requests],
            prompt_logprobs=first.prompt_logprobs if first.params.prompt_logprobs is not None else None,
            cached_tokens=first.cached_tokens,
            embedding=unit(first.state).tolist() if first.pooling and first.finish_reason == "stop" else None,
        )

    def chunks(self) -> Iterator[Chunk]:
        """What each answer has gained since the last call; its end once."""
        for place, request in enumerate(self.requests):
            done = request.is_finished
            if self._said_end[place]:
                continue
            ids = request.tokens[request.prompt_len + self._taken[place] :]
            text = self._take_text(request)
            if not (ids or text or done):
                continue
            logprobs = request.logprobs[self._taken[place] :] if request.params.logprobs is not None else None
            self._taken[place] += len(ids)
            self._said_end[place] = done
            yield Chunk(
                request_id=self.request_id,
                index=request.index,
                text=text,
                token_ids=ids,
                logprobs=logprobs,
                finish_reason=request.finish_reason,
                stop_reason=request.stop_reason,
                error=request.error,
            )

    @staticmethod
    def _take_text(request: Request) -> str:
        if request.text is None:
            return ""
        if request.is_finished:
            request.text.close()
        return str(request.text.take())

    def _completion(self, request: Request) -> CompletionOutput:
        if request.text is not None and request.is_finished:
            request.text.close()
        return CompletionOutput(
            index=request.index,
            text=request.text.text if request.text is not None else "",
            token_ids=request.tokens[request.prompt_len :],
            logprobs=request.logprobs if request.params.logprobs is not None else None,
            finish_reason=request.finish_reason,
            stop_reason=request.stop_reason,
            error=request.error,
        )
