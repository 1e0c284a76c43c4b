"""Errors as OpenAI's clients know them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from pydantic import BaseModel
from starlette.responses import Response

_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
}
_LONGEST_MESSAGE = 2000


class ApiError(Exception):
    """What a client is told instead of an answer.

    Args:
        status: of HTTP.
        message: for people; cut to 2,000 characters.
        param: the field that is at fault.
        code: for programs.
        headers: of the answer.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message if len(message) <= _LONGEST_MESSAGE else message[:_LONGEST_MESSAGE] + " ..."
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """In OpenAI's shape."""
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        return Response(encode(self.body()), self.status, self.headers, "application/json")


class ClientGone(Exception):
    """The client has closed its connection: nobody is left to answer to."""


class ErrorDetail(BaseModel):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(BaseModel):
    """The body of every answer that is not 2xx."""

    error: ErrorDetail


_encoder = msgspec.json.Encoder()


def encode(value: Any) -> bytes:
    """JSON. Half a surrogate pair, which UTF-8 cannot hold, becomes U+FFFD."""
    try:
        return _encoder.encode(value)
    except UnicodeEncodeError:
        return _encoder.encode(_without_surrogates(value))


def _without_surrogates(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, dict):
        return {_without_surrogates(key): _without_surrogates(item) for key, item in value.items()}
    return [_without_surrogates(item) for item in value] if isinstance(value, (list, tuple)) else value
