"""/health, /ready, /version, /metrics, and the page at /."""

from __future__ import annotations

import base64
import hashlib
import re
from importlib import resources
from typing import Literal

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel
from starlette.responses import Response

import phalanx
from phalanx.server.engine_client import EngineState
from phalanx.server.errors import ApiError, encode
from phalanx.server.openapi import described
from phalanx.server.service import Service, unavailable


class Status(BaseModel):
    """How it stands with the server."""

    status: Literal["ok"]
    engines: int
    """Behind the port, and those of them that live."""
    live: int


class Version(BaseModel):
    """Of Phalanx."""

    version: str


def health_router(service: Service) -> APIRouter:
    """The routes over one service."""
    router = APIRouter(tags=["operations"])
    page, policy = _page()

    def status() -> Response:
        told = {"status": "ok", "engines": len(service.engine.clients), "live": service.engine.live}
        return Response(encode(told), media_type="application/json")

    @router.get("/health", **described(None, Status, errors="503"))
    async def health() -> Response:
        """Alive: 503 once all engines have died. A server that loads its model is alive."""
        if service.engine.state not in (EngineState.READY, EngineState.STARTING):
            raise unavailable(service.engine)
        return status()

    @router.get("/ready", **described(None, Status, errors="503"))
    async def ready() -> Response:
        """Ready for requests: the model is loaded and warmed up, and the server is not about to end."""
        if service.draining:
            raise ApiError(503, "the server is shutting down", code="draining")
        service.check_engine()
        return status()

    @router.get("/version", **described(None, Version))
    async def version() -> Response:
        """Of Phalanx."""
        return Response(encode({"version": phalanx.__version__}), media_type="application/json")

    @router.get("/metrics", **described(None, "text/plain"))
    async def metrics() -> Response:
        """Prometheus series."""
        return Response(service.metrics.text(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    @router.get("/", include_in_schema=False)
    async def root() -> Response:
        """The page."""
        headers = {
            "Content-Security-Policy": policy,
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Cache-Control": "no-cache",
        }
        return Response(page, headers=headers, media_type="text/html; charset=utf-8")

    return router


def _page() -> tuple[bytes, str]:
    """The page, and a policy that lets its own script and style run and nothing else."""
    text = (resources.files("phalanx.server") / "page" / "index.html").read_text(encoding="utf-8")
    sources = {kind: " ".join(_hashes(text, kind)) or "'none'" for kind in ("script", "style")}
    policy = (
        f"default-src 'none'; script-src {sources['script']}; style-src {sources['style']}; img-src data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return text.encode(), policy


def _hashes(page: str, tag: str) -> list[str]:
    blocks = re.findall(rf"<{tag}\b[^>]*>(.*?)</{tag}>", page, re.DOTALL)
    return [f"'sha256-{base64.b64encode(hashlib.sha256(block.encode()).digest()).decode()}'" for block in blocks]
