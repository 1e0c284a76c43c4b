"""/v1/responses: a conversation goes on, told in items and events."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from phalanx.server.bodies import read_body
from phalanx.server.chat_job import ChatJob, chat_job
from phalanx.server.edge import RECORD, RequestRecord
from phalanx.server.engine_messages import Piece
from phalanx.server.errors import ApiError, encode
from phalanx.server.openapi import described
from phalanx.server.response_output import ResponseOutput
from phalanx.server.schema_responses import OWN_NAMES, ResponsesAnswer, ResponsesRequest
from phalanx.server.service import Service
from phalanx.server.sse import EventStream, unless_gone


def responses_router(service: Service) -> APIRouter:
    """The route over one service."""
    router = APIRouter(tags=["generation"])

    @router.post("/v1/responses", **described(ResponsesRequest, ResponsesAnswer, streams=True))
    async def responses(request: Request) -> Response:
        """Goes on from a text or from turns. Nothing is stored."""
        body = await read_body(request, ResponsesRequest)
        record: RequestRecord = request.scope[RECORD]
        run = await unless_gone(request.receive, _prepare(service, body, record))
        if body.stream:
            events = run.events()
            return EventStream(await unless_gone(request.receive, anext(events)), events)
        return Response(encode(await unless_gone(request.receive, run.whole())), media_type="application/json")

    return router


async def _prepare(service: Service, body: ResponsesRequest, record: RequestRecord) -> _Run:
    try:
        return _Run(service, body, await chat_job(service, body.chat(), record))
    except ApiError as error:
        error.param = OWN_NAMES.get(error.param or "", error.param)
        raise


class _Run:
    """One request's answer, whole or as events."""

    def __init__(self, service: Service, body: ResponsesRequest, job: ChatJob) -> None:
        self._service = service
        self._body = body
        self._generation = job.generation
        (self._text,) = job.outputs
        self._output = ResponseOutput(self._generation.record.request_id)
        self._created = int(time.time())
        self._cut = False

    async def whole(self) -> dict[str, Any]:
        async for pieces in self._generation.pieces():
            for _, piece in pieces:
                self._push(piece)
        self._output.end(self._cut)
        return await self._answer()

    async def events(self) -> AsyncGenerator[bytes, None]:
        output, pieces_of, begun = self._output, self._generation.pieces(), False
        try:
            async for pieces in pieces_of:
                events = b""
                if not begun:
                    begun, waiting = True, self._response("in_progress")
                    events = output.event("response.created", response=waiting)
                    events += output.event("response.in_progress", response=waiting)
                events += b"".join(self._push(piece) for _, piece in pieces)
                if events:
                    yield events
            ends = output.end(self._cut)
            answer = await self._answer()
            yield ends + output.event(f"response.{answer['status']}", response=answer)
        except ApiError as error:
            if not begun:
                raise
            self._generation.record.error = error.message
            yield output.event("error", code=error.code, message=error.message, param=error.param)
        finally:
            await pieces_of.aclose()

    def _push(self, piece: Piece) -> bytes:
        if self._service.settings.log_prompts:
            self._generation.record.answers.append(piece.text)
        self._cut = piece.finish_reason == "length"
        deltas = self._text.push(piece.text, piece.finish_reason is not None)
        return b"".join(map(self._output.push, deltas))

    async def _answer(self) -> dict[str, Any]:
        """The response at its end."""
        items, cut = self._output.items, self._cut
        usage, thought = self._generation.usage(), 0
        if items[0]["type"] == "reasoning" and self._service.tokenizer is not None:
            # The engine counts an answer's tokens as one: this is what the thinking's text makes.
            thought = len(await self._service.encode_plain(items[0]["content"][0]["text"]))
        return self._response("incomplete" if cut else "completed") | {
            "output": items,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "usage": {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": {"cached_tokens": self._generation.cached_tokens, "cache_write_tokens": 0},
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": thought},
                "total_tokens": usage["total_tokens"],
            },
        }

    def _response(self, status: str) -> dict[str, Any]:
        body = self._body
        choice = "auto" if body.tool_choice is None else body.tool_choice
        return {
            "id": f"resp_{self._generation.record.request_id}",
            "object": "response",
            "created_at": self._created,
            "status": status,
            "model": self._service.name,
            "output": [],
            "usage": None,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "store": False,
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "text": {"format": {"type": "text"}}
            if body.text is None or body.text.format is None
            else body.text.model_dump(by_alias=True, exclude_none=True),
            "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
            "tools": [tool.model_dump() for tool in body.tools or ()],
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "truncation": "disabled",
        }
