"""The application: routes over one Service, behind the Edge."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fastapi import FastAPI, Request
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp

import phalanx
from phalanx.server.edge import RECORD, Edge, RequestRecord
from phalanx.server.errors import ApiError, ClientGone
from phalanx.server.openapi import add_document
from phalanx.server.routes_chat import chat_router
from phalanx.server.routes_completions import completions_router
from phalanx.server.routes_embeddings import embeddings_router
from phalanx.server.routes_health import Status, Version, health_router
from phalanx.server.routes_models import (
    DetokenizeAnswer,
    DetokenizeRequest,
    ModelCard,
    ModelList,
    TokenizeAnswer,
    TokenizeRequest,
    models_router,
)
from phalanx.server.routes_responses import responses_router
from phalanx.server.schema_chat import ChatAnswer, ChatRequest
from phalanx.server.schema_completions import CompletionAnswer, CompletionRequest
from phalanx.server.schema_embeddings import EmbeddingAnswer, EmbeddingRequest
from phalanx.server.schema_responses import ResponsesAnswer, ResponsesRequest
from phalanx.server.service import Service

SCHEMAS: list[type[BaseModel]] = [
    *(CompletionRequest, CompletionAnswer, ChatRequest, ChatAnswer, EmbeddingRequest, EmbeddingAnswer),
    *(ResponsesRequest, ResponsesAnswer),
    *(ModelCard, ModelList, TokenizeRequest, TokenizeAnswer, DetokenizeRequest, DetokenizeAnswer, Status, Version),
]

ROUTERS = (completions_router, chat_router, responses_router, embeddings_router, models_router, health_router)


def build_app(service: Service, on_end: Sequence[Callable[[RequestRecord], None]] = ()) -> ASGIApp:
    """The whole application.

    Args:
        on_end: told of each request once it is answered: logs, traces.
    """
    app = FastAPI(
        title="Phalanx",
        version=phalanx.__version__,
        description=f"OpenAI-compatible routes of {service.name}.",
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    for router in ROUTERS:
        app.include_router(router(service))
    add_document(app, SCHEMAS, keyed=bool(service.settings.api_keys))
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(ClientGone, _client_gone)

    def end(record: RequestRecord) -> None:
        for tell in on_end:
            tell(record)

    edge: ASGIApp = Edge(app, service.settings, end)
    if not service.settings.cors_origins:
        return edge
    # Outermost: a browser asks without a key whether it may ask with one.
    return CORSMiddleware(
        edge,
        allow_origins=service.settings.cors_origins,
        allow_methods=["GET", "POST"],
        allow_headers=["Authorization", "Content-Type", "X-Request-Id"],
        expose_headers=["X-Request-Id", "Retry-After"],
    )


async def _api_error(request: Request, error: Exception) -> Response:
    known = error if isinstance(error, ApiError) else ApiError(500, "an internal error")
    request.scope[RECORD].error = known.message
    return known.response()


async def _client_gone(request: Request, error: Exception) -> Response:
    """Nobody reads it; the log has it."""
    return Response(status_code=499)


async def _http_error(request: Request, error: Exception) -> Response:
    """What the router says: no such path, or another method."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    messages = {404: "there is no such path", 405: f"{request.method} is not a method of this path"}
    headers = error.headers if isinstance(error, HTTPException) else None
    return ApiError(status, messages.get(status, "the request cannot be answered"), headers=headers).response()
