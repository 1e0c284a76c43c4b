"""/v1/chat/completions."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from phalanx.server.bodies import read_body
from phalanx.server.chat_job import ChatJob, chat_job
from phalanx.server.edge import RECORD, RequestRecord
from phalanx.server.engine_messages import Piece
from phalanx.server.envelope import Envelope
from phalanx.server.errors import ApiError, encode
from phalanx.server.openapi import described
from phalanx.server.schema_chat import ChatAnswer, ChatRequest
from phalanx.server.service import Service
from phalanx.server.sse import DONE, EventStream, event, unless_gone


def chat_router(service: Service) -> APIRouter:
    """The route over one service."""
    router = APIRouter(tags=["generation"])

    @router.post("/v1/chat/completions", **described(ChatRequest, ChatAnswer, streams=True))
    async def chat_completions(request: Request) -> Response:
        """Goes on from a conversation."""
        body = await read_body(request, ChatRequest)
        record: RequestRecord = request.scope[RECORD]
        job = await unless_gone(request.receive, chat_job(service, body, record))
        run = _Run(service, body, job)
        if body.stream:
            events = run.events()
            return EventStream(await unless_gone(request.receive, anext(events)), events)
        return Response(await unless_gone(request.receive, run.whole()), media_type="application/json")

    return router


class _Run:
    """One request's answers, whole or as events."""

    def __init__(self, service: Service, body: ChatRequest, job: ChatJob) -> None:
        self._service = service
        self._body = body
        self._generation = generation = job.generation
        kind = "chat.completion.chunk" if body.stream else "chat.completion"
        self._envelope = Envelope("chatcmpl", generation.record.request_id, kind, service.name, body.include_usage)
        self._outputs = job.outputs
        self._begun: set[int] = set()

    async def whole(self) -> bytes:
        choices: list[dict[str, Any]] = []
        async for pieces in self._generation.pieces():
            for _, piece in pieces:
                output = self._outputs[piece.index]
                output.push(piece.text, ended=True)
                choices.append(
                    {
                        "index": piece.index,
                        "message": output.message(),
                        "logprobs": self._logprobs(piece),
                        "finish_reason": output.finish_reason(piece.finish_reason),
                        "stop_reason": piece.stop_reason,
                    }
                )
                self._log(piece)
        choices.sort(key=lambda choice: choice["index"])
        return self._envelope.whole(choices, self._generation.usage())

    async def events(self) -> AsyncGenerator[bytes, None]:
        pieces_of = self._generation.pieces()
        begun = False
        try:
            async for pieces in pieces_of:
                chunks = b"".join(self._chunks(piece) for _, piece in pieces)
                if chunks:
                    begun = True
                    yield chunks
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

    def _chunks(self, piece: Piece) -> bytes:
        """The role first, then what the piece adds, its log-probabilities with the first of it, then its end."""
        output, chunks = self._outputs[piece.index], b""
        if piece.index not in self._begun:
            self._begun.add(piece.index)
            chunks += self._chunk(piece, {"role": "assistant", "content": ""})
        logprobs = self._logprobs(piece) if piece.token_ids else None
        deltas = output.push(piece.text, piece.finish_reason is not None)
        # Tokens whose text is held back still have their log-probabilities.
        for place, delta in enumerate(deltas or ([{"content": ""}] if logprobs else [])):
            chunks += self._chunk(piece, delta, logprobs if place == 0 else None)
        if piece.finish_reason is not None:
            chunks += self._chunk(piece, {}, None, output.finish_reason(piece.finish_reason), piece.stop_reason)
        self._log(piece)
        return chunks

    def _chunk(
        self,
        piece: Piece,
        delta: dict[str, Any],
        logprobs: dict[str, Any] | None = None,
        finish_reason: str | None = None,
        stop_reason: int | str | None = None,
    ) -> bytes:
        choice = {"index": piece.index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        return self._envelope.chunk(choice if finish_reason is None else {**choice, "stop_reason": stop_reason})

    def _logprobs(self, piece: Piece) -> dict[str, Any] | None:
        texts = self._service.token_texts
        if not self._body.logprobs or texts is None:
            return None
        entries = texts.chat_entries(piece.logprobs or [], self._body.top_logprobs or 0)
        return {"content": entries, "refusal": None}

    def _log(self, piece: Piece) -> None:
        if self._service.settings.log_prompts:
            self._generation.record.answers.append(piece.text)
