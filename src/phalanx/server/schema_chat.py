"""The request and the answer of /v1/chat/completions."""

from __future__ import annotations

import json
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, Field, StringConstraints, field_validator, model_validator

from phalanx.server.schema import Items, Sampling, Strict
from phalanx.server.schema_completions import Usage

_NOT_OF_TEMPLATES = frozenset(
    {
        *("tools", "messages", "chat_template", "add_generation_prompt", "continue_final_message"),
        # What the tokenizer would take for itself.
        *("conversation", "tokenize", "tokenizer_kwargs", "padding", "truncation", "max_length"),
        *("return_tensors", "return_dict", "return_assistant_tokens_mask"),
    }
)
FunctionName = Annotated[str, StringConstraints(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]


def _object_schema(schema: dict[str, Any]) -> dict[str, Any]:
    if schema.get("type", "object") != "object":
        raise ValueError('arguments are an object: the schema\'s "type" must be "object"')
    return schema


Parameters = Annotated[dict[str, Any], AfterValidator(_object_schema)]
"""A JSON schema of a function's arguments."""


class TextPart(Strict):
    """Content in parts; only text."""

    type: Literal["text"]
    text: str


class CalledFunction(Strict):
    """Which function, with which arguments."""

    name: str
    arguments: str

    @field_validator("arguments")
    @classmethod
    def _object(cls, value: str) -> str:
        try:
            found = json.loads(value or "{}")
        except (ValueError, RecursionError) as error:
            raise ValueError(f"arguments must be a JSON object: {error}") from None
        if not isinstance(found, dict):
            raise ValueError("arguments must be a JSON object")
        return value


class MessageToolCall(Strict):
    """A call that an assistant has made before."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = Field(default=None, exclude=True)
    """As in a streamed answer; its place in the list says the same."""


class Message(Strict):
    """One turn. Which roles there are, the chat template says."""

    HINTS: ClassVar[dict[str, str]] = {}

    role: Annotated[str, StringConstraints(min_length=1, max_length=64)]
    content: str | Annotated[list[TextPart], Items()] | None = None
    name: str | None = None
    tool_calls: Annotated[list[MessageToolCall], Items()] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None

    @field_validator("content", mode="before")
    @classmethod
    def _only_text(cls, value: Any) -> Any:
        for part in value if isinstance(value, list) else ():
            kind = part.get("type") if isinstance(part, dict) else None
            if isinstance(kind, str) and kind != "text":
                raise ValueError(f"content parts of type {kind[:64]!r} are not supported: this model reads text only")
        return value

    @model_validator(mode="after")
    def _said(self) -> Message:
        if self.content is None and self.role != "assistant":
            raise ValueError(f"a message of the role {self.role!r} needs content")
        return self

    def for_template(self) -> dict[str, Any]:
        """As chat templates know it: content is one text, arguments are an object."""
        # Templates that write the content of every message would write a null as "None".
        message: dict[str, Any] = {"role": self.role, "content": self.content or ""}
        if isinstance(self.content, list):
            message["content"] = "\n".join(part.text for part in self.content)
        for name in ("name", "tool_call_id", "reasoning_content"):
            value = getattr(self, name)
            if value is not None:
                message[name] = value
        if self.tool_calls:
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {
                        "name": call.function.name,
                        "arguments": json.loads(call.function.arguments or "{}"),
                    },
                }
                for call in self.tool_calls
            ]
        return message


class Function(Strict):
    """A function that the model may call."""

    name: FunctionName
    description: str | None = None
    parameters: Parameters | None = None
    strict: bool | None = None


class Tool(Strict):
    """Only functions are tools."""

    type: Literal["function"]
    function: Function


class NamedFunction(Strict):
    """A function by its name."""

    name: FunctionName


class NamedTool(Strict):
    """The function that must be called."""

    type: Literal["function"]
    function: NamedFunction


class ChatRequest(Sampling):
    """A conversation to go on with."""

    HINTS: ClassVar[dict[str, str]] = {
        "functions": "use tools",
        "function_call": "use tool_choice",
        "prompt": "plain prompts go to /v1/completions",
        "audio": "answers are text",
        "reasoning_effort": "give the chat template's own switch in chat_template_kwargs",
        "prediction": "leave it out",
        "store": "nothing is stored here",
    }

    messages: Annotated[list[Message], Items(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    max_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: Annotated[list[Tool], Items(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    chat_template: str | None = None
    """Refused unless the server was started with --trust-request-chat-template."""
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    modalities: Annotated[list[Literal["text"]], Items(min_length=1, max_length=1)] | None = None

    @model_validator(mode="after")
    def _consistent(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs belong to logprobs=true")
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise ValueError("max_tokens and max_completion_tokens are the same: give one")
        if not self.tools and self.tool_choice not in (None, "none"):
            raise ValueError("tool_choice needs tools")
        if not self.tools and self.parallel_tool_calls is not None:
            raise ValueError("parallel_tool_calls needs tools")
        names = [tool.function.name for tool in self.tools or ()]
        if len(set(names)) != len(names):
            raise ValueError("two tools have the same name")
        if isinstance(self.tool_choice, NamedTool) and self.tool_choice.function.name not in names:
            raise ValueError(f"tool_choice names {self.tool_choice.function.name!r}, which is not among the tools")
        if self.forces_call and (self.structured_outputs or self.response_format):
            raise ValueError("an answer that must be a call has no response_format or structured_outputs")
        forced = [tool for tool in self.tools or () if tool.function.strict and not self.forces_call]
        if forced:
            raise ValueError(
                f"the function {forced[0].function.name!r} is strict, which holds only where a call is forced: "
                'set tool_choice to "required" or to the function, or leave strict out'
            )
        taken = sorted(_NOT_OF_TEMPLATES.intersection(self.chat_template_kwargs or ()))
        if taken:
            raise ValueError(f"chat_template_kwargs cannot hold {taken[0]!r}: it is not for the template")
        if self.continue_final_message and self.add_generation_prompt:
            raise ValueError("continue_final_message and add_generation_prompt exclude each other")
        return self

    @property
    def forces_call(self) -> bool:
        """Whether the answer must be a call of a function."""
        return self.tool_choice == "required" or isinstance(self.tool_choice, NamedTool)

    def plain_tools(self) -> list[dict[str, Any]]:
        """The tools that the model may call, for templates and parsers."""
        if self.tool_choice == "none":
            return []
        return [tool.model_dump(exclude_none=True) for tool in self.tools or ()]

    def template_options(self) -> dict[str, Any]:
        """What goes to the chat template beside the messages."""
        options: dict[str, Any] = dict(self.chat_template_kwargs or {})
        if self.plain_tools():
            options["tools"] = self.plain_tools()
        if self.chat_template is not None:
            options["chat_template"] = self.chat_template
        if self.add_generation_prompt is not None:
            options["add_generation_prompt"] = self.add_generation_prompt
        if self.continue_final_message:
            options |= {"continue_final_message": True, "add_generation_prompt": False}
        return options


class TokenLogprob(BaseModel):
    """One token; ``logprob`` is null where it is not finite."""

    token: str
    logprob: float | None
    bytes: list[int]


class ChosenLogprob(TokenLogprob):
    """A token of the answer and the likeliest in its place."""

    top_logprobs: list[TokenLogprob]


class ChatLogprobs(BaseModel):
    """Of all tokens of the answer."""

    content: list[ChosenLogprob]
    refusal: None


class AnswerFunction(BaseModel):
    """Arguments are JSON as the model wrote it, which need not be valid."""

    name: str
    arguments: str


class AnswerToolCall(BaseModel):
    """A call that the model asks for."""

    id: str
    type: Literal["function"]
    function: AnswerFunction


class AnswerMessage(BaseModel):
    """What the model says."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str | None = None
    tool_calls: list[AnswerToolCall] | None = None


class ChatChoice(BaseModel):
    """One answer."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"] | None
    stop_reason: int | str | None


class ChatAnswer(BaseModel):
    """All answers."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
