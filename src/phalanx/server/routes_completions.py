"""/v1/completions."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from phalanx.server.bodies import read_body
from phalanx.server.edge import RECORD, RequestRecord
from phalanx.server.engine_messages import Piece
from phalanx.server.envelope import Envelope
from phalanx.server.errors import ApiError, encode
from phalanx.server.generation import Generation, Job
from phalanx.server.openapi import described
from phalanx.server.schema_completions import CompletionAnswer, CompletionRequest
from phalanx.server.service import Service
from phalanx.server.sse import DONE, EventStream, event, unless_gone
from phalanx.server.token_texts import CompletionLogprobs, joined


def completions_router(service: Service) -> APIRouter:
    """The route over one service."""
    router = APIRouter(tags=["generation"])

    @router.post("/v1/completions", **described(CompletionRequest, CompletionAnswer, streams=True))
    async def completions(request: Request) -> Response:
        """Goes on from texts or token ids."""
        body = await read_body(request, CompletionRequest)
        record: RequestRecord = request.scope[RECORD]
        run = await unless_gone(request.receive, _prepare(service, body, record))
        if body.stream:
            events = run.events()
            return EventStream(await unless_gone(request.receive, anext(events)), events)
        return Response(await unless_gone(request.receive, run.whole()), media_type="application/json")

    return router


async def _prepare(service: Service, body: CompletionRequest, record: RequestRecord) -> _Run:
    """Everything that can be wrong with a request is found here, before the engine hears of it."""
    service.check_model(body.model)
    prompts = body.prompts()
    limit = service.settings.max_prompts
    if len(prompts) > limit:
        raise ApiError(400, f"{len(prompts)} prompts in one request, the limit is {limit}", param="prompt")
    service.check_open(len(prompts) * (body.n or 1))
    needs_prompt_logprobs = bool(body.echo) and (body.logprobs is not None or body.max_tokens == 0)
    params = body.params(
        logprobs=body.logprobs,
        prompt_logprobs=(body.logprobs or 0) if needs_prompt_logprobs else None,
        guide=body.guide(),
    )
    if params.logprobs is not None and service.token_texts is None:
        raise ApiError(400, "logprobs are about texts, and this model has no tokenizer", param="logprobs")
    jobs, echoes = [], []
    for prompt in prompts:
        ids = await service.encode(prompt)
        await service.check(ids, params, "prompt", body.guide_field)
        jobs.append(Job(ids, params, body.cache_salt or ""))
        if body.echo:
            echoes.append(prompt if isinstance(prompt, str) else service.decode(ids))
    record.user = body.user
    if service.settings.log_prompts:
        record.prompts += prompts
    return _Run(service, body, Generation(service, jobs, record, bool(body.stream)), echoes)


class _Run:
    """One request's answers, whole or as events."""

    def __init__(self, service: Service, body: CompletionRequest, generation: Generation, echoes: list[str]) -> None:
        self._service = service
        self._body = body
        self._generation = generation
        self._echoes = echoes
        self._envelope = Envelope(
            "cmpl", generation.record.request_id, "text_completion", service.name, body.include_usage
        )
        self._prompt_logprobs: dict[int, Any] = {}
        self._logprobs: dict[tuple[int, int], CompletionLogprobs] = {}
        self._begun: set[tuple[int, int]] = set()

    async def whole(self) -> bytes:
        choices: list[dict[str, Any]] = []
        async for pieces in self._generation.pieces():
            choices += [self._choice(place, piece) for place, piece in pieces]
        choices.sort(key=lambda choice: choice["index"])
        return self._envelope.whole(choices, self._generation.usage())

    async def events(self) -> AsyncGenerator[bytes, None]:
        pieces_of = self._generation.pieces()
        begun = False
        try:
            async for pieces in pieces_of:
                choices = [self._choice(place, piece) for place, piece in pieces]
                shown = [one for one in choices if one["text"] or one["logprobs"] or one["finish_reason"]]
                if shown:
                    begun = True
                    yield b"".join(map(self._envelope.chunk, shown))
            if self._body.include_usage:
                yield self._envelope.usage_chunk(self._generation.usage())
        except ApiError as error:
            if not begun:
                raise
            self._generation.record.error = error.message
            yield event(encode(error.body()))
        finally:
            await pieces_of.aclose()
        yield DONE

    def _choice(self, place: int, piece: Piece) -> dict[str, Any]:
        if piece.beginning is not None:
            self._prompt_logprobs[place] = piece.beginning.prompt_logprobs
        key = (place, piece.index)
        first = key not in self._begun
        self._begun.add(key)
        text = self._echoes[place] + piece.text if first and self._echoes else piece.text
        if self._service.settings.log_prompts:
            self._generation.record.answers.append(piece.text)
        return {
            "index": place * (self._body.n or 1) + piece.index,
            "text": text,
            "logprobs": self._logprobs_of(key, piece, first),
            "finish_reason": piece.finish_reason,
            "stop_reason": piece.stop_reason,
        }

    def _logprobs_of(self, key: tuple[int, int], piece: Piece, first: bool) -> dict[str, Any] | None:
        top, texts = self._body.logprobs, self._service.token_texts
        if top is None or texts is None:
            return None
        counter = self._logprobs.setdefault(key, CompletionLogprobs(texts, top))
        prompt = self._prompt_logprobs.get(key[0])
        if not (first and self._echoes and prompt):
            return counter.piece(piece.logprobs or []) if piece.logprobs or piece.finish_reason else None
        echoed = counter.prompt(self._generation.jobs[key[0]].token_ids, prompt)
        return joined(echoed, counter.piece(piece.logprobs or []))
