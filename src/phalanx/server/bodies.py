"""Request bodies: read within a time, parsed strictly, refused with the field's name."""

from __future__ import annotations

import asyncio
import re
from reprlib import Repr
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import from_json, to_json
from starlette.requests import ClientDisconnect, Request

from phalanx.server.errors import ApiError, ClientGone

_READ_SECONDS = 60.0
_PARTS = 100_000
_STRING = re.compile(rb'"[^"]*"')
_short = Repr()
_short.maxlist = _short.maxdict = 10
_short.maxstring = _short.maxlong = _short.maxother = 100
Body = TypeVar("Body", bound=BaseModel)


async def read_body(request: Request, schema: type[Body]) -> Body:
    """The body of a request as ``schema``. JSON's types are taken as they are: "5" is no number, true neither.

    Raises:
        ApiError: 400 for what is no JSON or not of the schema, 408 for a body that does not come, 413 for one too long.
        ClientGone: the client left meanwhile.
    """
    try:
        async with asyncio.timeout(_READ_SECONDS):
            data = await request.body()
    except TimeoutError:
        raise ApiError(408, f"the request body did not come within {_READ_SECONDS:g} s") from None
    except ClientDisconnect:
        raise ClientGone from None
    kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(400, f"the body must be application/json, given {kind!r}", param="Content-Type")
    if _crowded(data):
        raise ApiError(400, f"the body has more than {_PARTS} lists, objects and members of objects")
    try:
        return schema.model_validate_json(data, strict=True)
    except ValidationError as error:
        nulls = _unknown_nulls(error)
        if not nulls:
            raise explained(error, schema, data) from None
    # A null asks for nothing, also where the field is one that is not supported.
    data = to_json({name: value for name, value in from_json(data).items() if name not in nulls})
    try:
        return schema.model_validate_json(data, strict=True)
    except ValidationError as error:
        raise explained(error, schema, data) from None


def _unknown_nulls(error: ValidationError) -> set[int | str]:
    """Fields of the body itself that are not known, and null."""
    faults = error.errors(include_url=False, include_context=False)
    return {
        fault["loc"][0]
        for fault in faults
        if fault["type"] == "extra_forbidden" and len(fault["loc"]) == 1 and fault["input"] is None
    }


def _crowded(data: bytes) -> bool:
    """Whether there are so many parts, each perhaps a fault to explain, that it would hold up everybody else."""
    if _parts(data) <= _PARTS:
        return False
    return _parts(_STRING.sub(b"", data.replace(b"\\\\", b"").replace(b'\\"', b""))) > _PARTS


def _parts(data: bytes) -> int:
    return data.count(b":") + data.count(b"[") + data.count(b"{")


def explained(error: ValidationError, schema: type[BaseModel], data: bytes) -> ApiError:
    """A 400 that names the field of the body ``data`` that is at fault."""
    faults = error.errors(include_url=False, include_context=False)
    fault = faults[0]
    if fault["type"] == "json_invalid":
        return ApiError(400, f"the body is not valid JSON: {fault['msg'].removeprefix('Invalid JSON: ')}")
    field = ".".join(_place(fault["loc"], fault["type"] == "missing", from_json(data)))
    if fault["type"] == "extra_forbidden":
        hint = getattr(schema, "HINTS", {}).get(field, "remove it")
        return ApiError(400, f"{field} is not supported here: {hint}", param=field, code="unsupported_parameter")
    # One field of several kinds has a fault for each of them.
    messages = dict.fromkeys(
        other["msg"].removeprefix("Value error, ")
        for other in faults
        if other["loc"][:1] == fault["loc"][:1] and other["type"] != "extra_forbidden"
    )
    text = " or: ".join(list(messages)[:6])
    if not field:
        return ApiError(400, text)
    return ApiError(400, f"{field}: {text}{_given(fault['input'])}", param=field)


def _place(parts: tuple[int | str, ...], missing: bool, body: Any) -> list[str]:
    """The parts of a fault's place that are in the body, without pydantic's names for the kinds of a union."""
    found = []
    for number, part in enumerate(parts):
        if (isinstance(body, dict) and part in body) or (isinstance(body, list) and isinstance(part, int)):
            body = body[part]  # type: ignore[index]
        elif not (missing and number == len(parts) - 1):
            continue
        found.append(str(part))
    return found


def _given(value: Any) -> str:
    text = _short.repr(value)
    return f" (given {text if len(text) <= 100 else text[:100] + '...'})"
