"""/v1/chat/completions."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from phalanx.engine.guides import Guide
from phalanx.server.bodies import read_body
from phalanx.server.chat_output import ChatOutput
from phalanx.server.edge import RECORD, RequestRecord
from phalanx.server.engine_messages import Piece
from phalanx.server.envelope import Envelope
from phalanx.server.errors import ApiError, encode
from phalanx.server.generation import Generation, Job
from phalanx.server.openapi import described
from phalanx.server.parsing import OutputParser, tool_guide
from phalanx.server.parsing.reasoning import MARKS
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
        run = await unless_gone(request.receive, _prepare(service, body, record))
        if body.stream:
            events = run.events()
            return EventStream(await unless_gone(request.receive, anext(events)), events)
        return Response(await unless_gone(request.receive, run.whole()), media_type="application/json")

    return router


async def _prepare(service: Service, body: ChatRequest, record: RequestRecord) -> _Run:
    """Everything that can be wrong with a request is found here, before the engine hears of it."""
    service.check_model(body.model)
    if body.chat_template is not None and not service.settings.trust_request_templates:
        raise ApiError(
            400,
            "chat_template is not taken from requests here: start the server with --trust-request-chat-template",
            param="chat_template",
        )
    service.check_open()
    text = await service.chat_text([message.for_template() for message in body.messages], body.template_options())
    parser, opens = _parser(service, body, text), _opens_reasoning(service, text)
    params = body.params(
        max_tokens=body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        guide=_guide(service, body, opens),
        skip_special_tokens=False if parser is not None and parser.needs_special_tokens else body.skip_special_tokens,
    )
    ids = await service.encode_plain(text)
    await service.check(ids, params, "tools" if body.forces_call else body.guide_field)
    record.user = body.user
    if service.settings.log_prompts:
        record.prompts.append(text)
    generation = Generation(service, [Job(ids, params, body.cache_salt or "")], record, bool(body.stream))
    return _Run(service, body, generation, text)


def _parser(service: Service, body: ChatRequest, prompt: str) -> OutputParser | None:
    """A fresh reader of an answer to this prompt; None where all of it is content."""
    tools = body.plain_tools()
    tool_format, reasoning_format = service.tool_format if tools else None, service.reasoning_format
    if tools and tool_format is None:
        raise ApiError(
            400, "how this model calls functions is not known: start the server with --tool-format", param="tools"
        )
    if tool_format is None and reasoning_format is None:
        return None
    return OutputParser(tool_format, reasoning_format, _opens_reasoning(service, prompt), tools)


def _opens_reasoning(service: Service, prompt: str) -> bool:
    """Whether the prompt ends within the model's thinking."""
    return service.reasoning_format is not None and prompt.rstrip().endswith(MARKS[service.reasoning_format][0])


def _guide(service: Service, body: ChatRequest, opens_reasoning: bool) -> Guide | None:
    """What the answer must look like, behind the thinking where the prompt has opened it."""
    guide = _whole_guide(service, body)
    if guide is None or not opens_reasoning or service.reasoning_format is None:
        return guide
    return guide.model_copy(update={"after": MARKS[service.reasoning_format][1]})


def _whole_guide(service: Service, body: ChatRequest) -> Guide | None:
    if not body.forces_call or service.tool_format is None:
        return body.guide()
    choice: Any = "required" if body.tool_choice == "required" else body.tool_choice.model_dump()  # type: ignore[union-attr]
    parallel = body.parallel_tool_calls is not False
    try:
        return tool_guide(service.tool_format, body.plain_tools(), choice, service.special_tokens, parallel)
    except ValueError as error:
        raise ApiError(400, f"tools: {error}", param="tools") from None


class _Run:
    """One request's answers, whole or as events."""

    def __init__(self, service: Service, body: ChatRequest, generation: Generation, prompt: str) -> None:
        self._service = service
        self._body = body
        self._generation = generation
        kind = "chat.completion.chunk" if body.stream else "chat.completion"
        self._envelope = Envelope("chatcmpl", generation.record.request_id, kind, service.name, body.include_usage)
        parallel = body.parallel_tool_calls is not False
        self._outputs = [ChatOutput(_parser(service, body, prompt), parallel) for _ in range(body.n or 1)]
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
