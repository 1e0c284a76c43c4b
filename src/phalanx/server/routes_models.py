"""/v1/models, /tokenize and /detokenize: what is served, and its tokens."""

from __future__ import annotations

import time
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from pydantic import BaseModel, StringConstraints, model_validator
from starlette.responses import Response

from phalanx.server.bodies import read_body
from phalanx.server.errors import ApiError, encode
from phalanx.server.openapi import described
from phalanx.server.schema import Items, Strict, TokenId
from phalanx.server.schema_chat import Message
from phalanx.server.service import Service
from phalanx.server.sse import unless_gone

ModelName = Annotated[str, StringConstraints(max_length=1024)]


class ModelCard(BaseModel):
    """A model that is served; beyond OpenAI, its context in tokens (null while it is loaded)."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int | None


class ModelList(BaseModel):
    """All names that the model goes by."""

    object: Literal["list"]
    data: list[ModelCard]


class TokenizeRequest(Strict):
    """A text, or a conversation as the chat template writes it."""

    model: ModelName | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Items(min_length=1)] | None = None
    add_special_tokens: bool | None = None
    """Those that the tokenizer adds to a text; true where it is not given."""
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _one(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give a prompt or messages, and not both")
        if self.messages is not None and self.add_special_tokens is not None:
            raise ValueError("add_special_tokens is about texts: the chat template owns those of a conversation")
        return self


class TokenizeAnswer(BaseModel):
    """Token ids."""

    tokens: list[int]
    count: int
    max_model_len: int
    token_strs: list[str] | None


class DetokenizeRequest(Strict):
    """Token ids."""

    model: ModelName | None = None
    tokens: Annotated[list[TokenId], Items(max_length=2**20)]


class DetokenizeAnswer(BaseModel):
    """Their text, special tokens included."""

    prompt: str


def models_router(service: Service) -> APIRouter:
    """The routes over one service."""
    router = APIRouter(tags=["models"])
    created = int(time.time())

    def card(name: str) -> dict[str, Any]:
        ready = service.engine.ready
        length = None if ready is None else ready.max_model_len
        return {"id": name, "object": "model", "created": created, "owned_by": "phalanx", "max_model_len": length}

    @router.get("/v1/models", **described(None, ModelList))
    async def models() -> Response:
        """All names that the model goes by."""
        return _json({"object": "list", "data": [card(name) for name in service.names]})

    @router.get("/v1/models/{model:path}", **described(None, ModelCard, errors="404"))
    async def model(model: str) -> Response:
        """One of them."""
        service.check_model(model)
        return _json(card(model))

    @router.post("/tokenize", **described(TokenizeRequest, TokenizeAnswer))
    async def tokenize(request: Request) -> Response:
        """The tokens of a text or of a conversation."""
        body = await read_body(request, TokenizeRequest)
        _check(body.model)
        return _json(await unless_gone(request.receive, _tokens(service, body)))

    @router.post("/detokenize", **described(DetokenizeRequest, DetokenizeAnswer))
    async def detokenize(request: Request) -> Response:
        """The text of tokens."""
        body = await read_body(request, DetokenizeRequest)
        _check(body.model)
        vocab_size = service.ready.vocab_size
        wrong = next((token for token in body.tokens if token >= vocab_size), None)
        if wrong is not None:
            raise ApiError(400, f"token id {wrong} is outside the vocabulary of {vocab_size}", param="tokens")
        return _json({"prompt": await service.decode_long(body.tokens)})

    def _check(name: str | None) -> None:
        if name is not None:
            service.check_model(name)

    return router


async def _tokens(service: Service, body: TokenizeRequest) -> dict[str, Any]:
    if body.messages is not None:
        text = await service.chat_text([message.for_template() for message in body.messages], {})
        ids = await service.encode_plain(text)
    else:
        ids = await service.encode_plain(body.prompt or "", special=body.add_special_tokens is not False)
    strings = await service.token_texts_of(ids) if body.return_token_strs else None
    return {"tokens": ids, "count": len(ids), "max_model_len": service.ready.max_model_len, "token_strs": strings}


def _json(value: Any) -> Response:
    return Response(encode(value), media_type="application/json")
