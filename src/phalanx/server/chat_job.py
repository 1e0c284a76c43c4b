"""ChatJob: a conversation, checked and ready to run, with the readers of its answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from phalanx.engine.guides import Guide
from phalanx.server.chat_output import ChatOutput
from phalanx.server.edge import RequestRecord
from phalanx.server.errors import ApiError
from phalanx.server.generation import Generation, Job
from phalanx.server.parsing import OutputParser, tool_formats, tool_guide
from phalanx.server.parsing.reasoning import MARKS
from phalanx.server.schema_chat import ChatRequest
from phalanx.server.service import Service


@dataclass(frozen=True)
class ChatJob:
    """What runs, and an output for each of its ``n`` answers."""

    generation: Generation
    outputs: list[ChatOutput]


async def chat_job(service: Service, body: ChatRequest, record: RequestRecord) -> ChatJob:
    """Everything that can be wrong with a request is found here, before the engine hears of it.

    Raises:
        ApiError: 400 for what cannot be honoured, 404 for another model, 429 or 503 where nothing is let in.
    """
    service.check_model(body.model)
    if body.chat_template is not None and not service.settings.trust_request_templates:
        raise ApiError(
            400,
            "chat_template is not taken from requests here: start the server with --trust-request-chat-template",
            param="chat_template",
        )
    service.check_open(body.n or 1)
    text = await service.chat_text([message.for_template() for message in body.messages], body.template_options())
    opens = opens_reasoning(service, text)
    parsers = [_parser(service, body, opens) for _ in range(body.n or 1)]
    needs_special = parsers[0] is not None and parsers[0].needs_special_tokens
    params = body.params(
        max_tokens=body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        guide=guide_of(service, body, opens),
        skip_special_tokens=False if needs_special else body.skip_special_tokens,
    )
    service.check_size(text, "messages")
    ids = await service.encode_plain(text)
    await service.check(ids, params, "messages", "tools" if body.forces_call else body.guide_field)
    record.user = body.user
    if service.settings.log_prompts:
        record.prompts.append(text)
    generation = Generation(service, [Job(ids, params, body.cache_salt or "")], record, bool(body.stream))
    return ChatJob(generation, [ChatOutput(parser, body.parallel_tool_calls is not False) for parser in parsers])


def opens_reasoning(service: Service, prompt: str) -> bool:
    """Whether the prompt ends within the model's thinking."""
    return service.reasoning_format is not None and prompt.rstrip().endswith(MARKS[service.reasoning_format][0])


def guide_of(service: Service, body: ChatRequest, opens: bool) -> Guide | None:
    """What the answer must look like, behind the thinking where the prompt has opened it."""
    guide = _whole_guide(service, body)
    if guide is None or not opens or service.reasoning_format is None:
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


def _parser(service: Service, body: ChatRequest, opens: bool) -> OutputParser | None:
    """A fresh reader of an answer; None where all of it is content."""
    tools = body.plain_tools()
    tool_format, reasoning_format = service.tool_format if tools else None, service.reasoning_format
    if tools and tool_format is None:
        raise ApiError(
            400,
            "how this model calls functions is not known: start the server with --tool-format "
            f"({', '.join(tool_formats())})",
            param="tools",
        )
    if tool_format is None and reasoning_format is None:
        return None
    return OutputParser(tool_format, reasoning_format, opens, tools)
