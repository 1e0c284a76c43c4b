"""The OpenAPI document: requests are parsed and answers written by hand, so what they look like is told by hand too."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from phalanx.server.errors import ErrorAnswer

_ERRORS = {
    "400": "a bad request; `param` names the field",
    "401": "no valid API key",
    "404": "no such model or path",
    "405": "another method is needed",
    "408": "it took longer than a request may",
    "413": "the body is too long",
    "429": "too many requests wait",
    "500": "an internal error",
    "503": "no engine now, or the server is shutting down",
}
_REF = "#/components/schemas/{model}"


def described(
    request: type[BaseModel] | None, answer: type[BaseModel] | str, *, streams: bool = False, errors: str = ""
) -> dict[str, Any]:
    """Arguments of a route that tell what it takes and gives.

    Args:
        request: the JSON body; None: there is none.
        answer: JSON of this schema, or another media type.
        streams: the answer may come as server-sent events.
        errors: statuses beside those that every route has, separated by spaces.
    """
    content: dict[str, Any] = (
        {answer: {"schema": {"type": "string"}}} if isinstance(answer, str) else _json(answer.__name__)
    )
    if streams:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    statuses = (
        _ERRORS if request is not None else {code: _ERRORS[code] for code in ("401", "405", "500", *errors.split())}
    )
    extra: dict[str, Any] = {
        "responses": {
            "200": {"description": "the answer", "content": content},
            **{code: {"description": text, "content": _json("ErrorAnswer")} for code, text in statuses.items()},
        }
    }
    if request is not None:
        extra["requestBody"] = {"required": True, "content": _json(request.__name__)}
    return {"openapi_extra": extra, "response_model": None}


def add_document(app: FastAPI, schemas: list[type[BaseModel]], keyed: bool) -> None:
    """Makes ``app`` tell of these schemas, and of the API key where one is needed."""

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            found = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
            inputs = [(schema, "validation") for schema in (*schemas, ErrorAnswer)]
            _, definitions = models_json_schema(inputs, ref_template=_REF)  # type: ignore[arg-type]
            components = found.setdefault("components", {})
            components["schemas"] = definitions["$defs"]
            for path in found["paths"].values():
                for operation in path.values():
                    operation["responses"].pop("422", None)
            if keyed:
                components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
                found["security"] = [{"key": []}]
            app.openapi_schema = found
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]


def _json(name: str) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": _REF.format(model=name)}}}
