"""The request of /v1/responses, read as a conversation, and its answer.

What is not supported has no field here, and is refused by name: nothing is stored, so nothing can be referred to.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    BaseModel,
    Discriminator,
    Field,
    StringConstraints,
    Tag,
    ValidationError,
    field_validator,
    model_validator,
)

from phalanx.server.errors import ApiError
from phalanx.server.schema import Items, ShortText, Strict
from phalanx.server.schema_chat import ChatRequest, FunctionName, Parameters

_Id = Annotated[str, StringConstraints(max_length=256)]
_Status = Literal["in_progress", "completed", "incomplete"]


class InputText(Strict):
    """Text in parts. Parts of an answer before carry what the answer had."""

    type: Literal["input_text", "output_text"]
    text: str
    annotations: Annotated[list[Any], Items(max_length=0)] | None = None
    logprobs: Annotated[list[Any], Items(max_length=0)] | None = None


class InputMessage(Strict):
    """One turn. The role "developer" is what chat templates know as "system"."""

    type: Literal["message"] | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: str | Annotated[list[InputText], Items()]
    id: _Id | None = None
    status: _Status | None = None

    @field_validator("content", mode="before")
    @classmethod
    def _only_text(cls, value: Any) -> Any:
        for part in value if isinstance(value, list) else ():
            kind = part.get("type") if isinstance(part, dict) else None
            if isinstance(kind, str) and kind not in ("input_text", "output_text"):
                raise ValueError(f"content parts of type {kind[:64]!r} are not supported: this model reads text only")
        return value


class InputCall(Strict):
    """A call that the model has made before."""

    type: Literal["function_call"]
    call_id: _Id
    name: str
    arguments: str
    id: _Id | None = None
    status: _Status | None = None


class InputCallOutput(Strict):
    """What a function gave."""

    type: Literal["function_call_output"]
    call_id: _Id
    output: str | Annotated[list[InputText], Items()]
    id: _Id | None = None
    status: _Status | None = None


class ReasoningText(Strict):
    """A part of the thinking."""

    type: Literal["reasoning_text"]
    text: str


class InputReasoning(Strict):
    """What the model thought before an answer."""

    type: Literal["reasoning"]
    content: Annotated[list[ReasoningText], Items()] | None = None
    summary: Annotated[list[Any], Items(max_length=0)] | None = None
    id: _Id | None = None
    status: _Status | None = None


def _kind(item: Any) -> str:
    """Which kind of item it is: a message where it says nothing."""
    kind = item.get("type") if isinstance(item, dict) else getattr(item, "type", None)
    return str(kind or "message")[:64]


InputItem = Annotated[
    Annotated[InputMessage, Tag("message")]
    | Annotated[InputCall, Tag("function_call")]
    | Annotated[InputCallOutput, Tag("function_call_output")]
    | Annotated[InputReasoning, Tag("reasoning")],
    Discriminator(
        _kind,
        custom_error_type="item_kind",
        custom_error_message="items are of type message, function_call, function_call_output or reasoning",
    ),
]


class ResponsesTool(Strict):
    """A function that the model may call; there are no built-in tools here."""

    type: Literal["function"]
    name: FunctionName
    description: str | None = None
    parameters: Parameters | None = None
    strict: bool | None = None


class NamedFunctionTool(Strict):
    """The function that must be called."""

    type: Literal["function"]
    name: FunctionName


class TextFormat(Strict):
    """Text, any JSON object, or JSON of a schema."""

    type: Literal["text", "json_object", "json_schema"]
    name: Annotated[str, StringConstraints(max_length=256)] | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None

    @model_validator(mode="after")
    def _consistent(self) -> TextFormat:
        extra = [name for name in ("name", "description", "schema_", "strict") if getattr(self, name) is not None]
        if self.type == "json_schema" and self.schema_ is None:
            raise ValueError("json_schema needs a schema")
        if self.type != "json_schema" and extra:
            raise ValueError(f'{extra[0].rstrip("_")} belongs to type "json_schema"')
        return self

    def response_format(self) -> dict[str, Any]:
        """As chat completions have it."""
        if self.type != "json_schema":
            return {"type": self.type}
        fields = {"name": self.name, "description": self.description, "schema": self.schema_, "strict": self.strict}
        return {"type": self.type, "json_schema": {name: one for name, one in fields.items() if one is not None}}


class TextConfig(Strict):
    """What the answer looks like."""

    HINTS: ClassVar[dict[str, str]] = {}
    format: TextFormat | None = None


class ResponsesRequest(Strict):
    """A text, or turns, to go on with."""

    HINTS: ClassVar[dict[str, str]] = {
        "previous_response_id": "nothing is stored here: send the earlier turns in input",
        "conversation": "nothing is stored here: send the earlier turns in input",
        "prompt": "nothing is stored here: use instructions and input",
        "reasoning": "give the chat template's own switch in chat_template_kwargs",
        "max_tokens": "use max_output_tokens",
        "messages": "use input",
        "include": "the answer holds all that there is",
    }

    model: Annotated[str, StringConstraints(max_length=1024)]
    input: str | Annotated[list[InputItem], Items(min_length=1)]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    text: TextConfig | None = None
    tools: Annotated[list[ResponsesTool], Items(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedFunctionTool | None = None
    parallel_tool_calls: bool | None = None
    stream: bool | None = None
    store: bool | None = None
    background: bool | None = None
    truncation: Literal["auto", "disabled"] | None = None
    metadata: Annotated[dict[Annotated[str, StringConstraints(max_length=64)], str], Field(max_length=16)] | None = None
    """Comes back with the answer."""
    user: ShortText | None = None
    cache_salt: ShortText | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @field_validator("store", "background")
    @classmethod
    def _never(cls, value: bool | None, info: Any) -> bool | None:
        if value:
            raise ValueError(f"{info.field_name}=true is not supported: nothing is stored here")
        return value

    @field_validator("truncation")
    @classmethod
    def _whole(cls, value: str | None) -> str | None:
        if value == "auto":
            raise ValueError("auto is not supported: a conversation that is too long is refused")
        return value

    @field_validator("tools", mode="before")
    @classmethod
    def _functions(cls, value: Any) -> Any:
        for tool in value if isinstance(value, list) else ():
            kind = tool.get("type") if isinstance(tool, dict) else None
            if isinstance(kind, str) and kind != "function":
                raise ValueError(f"tools of type {kind[:64]!r} are not supported: only functions are")
        return value

    def chat(self) -> ChatRequest:
        """The same as a conversation.

        Raises:
            ApiError: 400 for what fits no conversation.
        """
        fields = {
            "model": self.model,
            "messages": self._messages(),
            "max_completion_tokens": self.max_output_tokens,
            "tools": [
                {"type": "function", "function": tool.model_dump(exclude={"type"}, exclude_none=True)}
                for tool in self.tools or ()
            ],
            "tool_choice": self.tool_choice
            if not isinstance(self.tool_choice, NamedFunctionTool)
            else {"type": "function", "function": {"name": self.tool_choice.name}},
            "response_format": None
            if self.text is None or self.text.format is None
            else self.text.format.response_format(),
        }
        for name in ("temperature", "top_p", "top_k", "min_p", "seed", "parallel_tool_calls", "stream", "user"):
            fields[name] = getattr(self, name)
        for name in ("cache_salt", "chat_template_kwargs"):
            fields[name] = getattr(self, name)
        try:
            return ChatRequest.model_validate(fields, strict=True)
        except ValidationError as error:
            fault = error.errors(include_url=False, include_context=False)[0]
            field = OWN_NAMES.get(str(fault["loc"][0]), str(fault["loc"][0])) if fault["loc"] else None
            message = fault["msg"].removeprefix("Value error, ")
            raise ApiError(400, f"{field}: {message}" if field else message, param=field) from None

    def _messages(self) -> list[dict[str, Any]]:
        """Calls and thinking become part of the turn of the assistant that they belong to."""
        messages: list[dict[str, Any]] = []
        if self.instructions is not None:
            messages.append({"role": "system", "content": self.instructions})
        thought = ""
        for item in [InputMessage(role="user", content=self.input)] if isinstance(self.input, str) else self.input:
            if isinstance(item, InputReasoning):
                thought += "".join(part.text for part in item.content or ())
                continue
            if isinstance(item, InputCallOutput):
                messages.append({"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)})
                continue
            if isinstance(item, InputCall):
                function = {"name": item.name, "arguments": item.arguments}
                call = {"id": item.call_id, "type": "function", "function": function}
                if not (messages and messages[-1]["role"] == "assistant") or thought:
                    messages.append({"role": "assistant", "content": ""})
                messages[-1].setdefault("tool_calls", []).append(call)
            else:
                role = "system" if item.role == "developer" else item.role
                messages.append({"role": role, "content": _text(item.content)})
            if thought and messages[-1]["role"] == "assistant":
                messages[-1]["reasoning_content"] = thought
            thought = ""
        return messages


OWN_NAMES = {
    "messages": "input",
    "prompt": "input",
    "response_format": "text",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
}
"""What fields of a conversation are called here."""


def _text(content: str | list[InputText]) -> str:
    return content if isinstance(content, str) else "\n".join(part.text for part in content)


class ResponsesAnswer(BaseModel):
    """The answer, as OpenAI's clients know it; ``output`` holds reasoning, messages and calls of functions."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["in_progress", "completed", "incomplete"]
    model: str
    output: list[dict[str, Any]]
    usage: dict[str, Any] | None
    error: None
    incomplete_details: dict[str, str] | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    previous_response_id: None
    store: Literal[False]
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_p: float
    truncation: Literal["disabled"]
