"""/v1/embeddings."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
from fastapi import APIRouter, Request
from starlette.responses import Response

from phalanx.engine.pooling import unit
from phalanx.engine.sampling_params import SamplingParams
from phalanx.server.bodies import read_body
from phalanx.server.edge import RECORD, RequestRecord
from phalanx.server.errors import ApiError, encode
from phalanx.server.generation import Generation, Job
from phalanx.server.openapi import described
from phalanx.server.schema_embeddings import EmbeddingAnswer, EmbeddingRequest
from phalanx.server.service import Service
from phalanx.server.sse import unless_gone


def embeddings_router(service: Service) -> APIRouter:
    """The route over one service."""
    router = APIRouter(tags=["embeddings"])

    @router.post("/v1/embeddings", **described(EmbeddingRequest, EmbeddingAnswer))
    async def embeddings(request: Request) -> Response:
        """Vectors of texts or token ids."""
        body = await read_body(request, EmbeddingRequest)
        answer = await unless_gone(request.receive, _embed(service, body, request.scope[RECORD]))
        return Response(encode(answer), media_type="application/json")

    return router


async def _embed(service: Service, body: EmbeddingRequest, record: RequestRecord) -> dict[str, Any]:
    service.check_model(body.model)
    if body.dimensions is not None and not body.truncate:
        raise ApiError(
            400,
            "dimensions would cut the embedding off, which this model may not be made for: say truncate=true too",
            param="dimensions",
        )
    if body.truncate and body.dimensions is None:
        raise ApiError(
            400,
            "truncate cuts embeddings off, and dimensions, which says where, is not given; inputs are never cut",
            param="truncate",
        )
    inputs, limit = body.inputs(), service.settings.max_prompts
    if len(inputs) > limit:
        raise ApiError(400, f"{len(inputs)} inputs in one request, the limit is {limit}", param="input")
    service.check_open(len(inputs))
    jobs = []
    for given in inputs:
        ids = await service.encode(given, "input")
        service.check_length(ids, "input")
        jobs.append(Job(ids, SamplingParams(), body.cache_salt or "", body.pooling or "last"))
    record.user = body.user
    if service.settings.log_prompts:
        record.prompts += inputs
    generation = Generation(service, jobs, record, streamed=False)
    vectors: dict[int, bytes] = {}
    async for pieces in generation.pieces():
        vectors |= {place: piece.vector for place, piece in pieces if piece.vector is not None}
    tokens = generation.prompt_tokens
    return {
        "object": "list",
        "data": [
            {"object": "embedding", "index": place, "embedding": _written(body, vectors[place])}
            for place in range(len(jobs))
        ],
        "model": service.name,
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }


def _written(body: EmbeddingRequest, vector: bytes) -> str | list[float]:
    """The numbers as they were asked for."""
    numbers = np.frombuffer(vector, "<f4")
    if body.dimensions is not None:
        if body.dimensions > len(numbers):
            raise ApiError(
                400, f"dimensions={body.dimensions}, but embeddings have {len(numbers)} numbers", param="dimensions"
            )
        numbers = unit(numbers[: body.dimensions])
    if body.encoding_format == "base64":
        return base64.b64encode(numbers.astype("<f4").tobytes()).decode()
    found: list[float] = numbers.tolist()
    return found
