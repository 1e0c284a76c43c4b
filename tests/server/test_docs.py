"""docs/serving.md names what there is."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from phalanx.cli.serve import ServerOptions
from phalanx.server.schema_chat import ChatRequest
from phalanx.server.schema_completions import CompletionRequest
from tests.server.running import Server

TEXT = (Path(__file__).parents[2] / "docs" / "serving.md").read_text()


def test_every_flag_is_named_and_every_named_flag_is_there(run: Callable[..., Any]) -> None:
    named = set(re.findall(r"--[a-z][a-z-]+", TEXT))
    for field in ServerOptions.__dataclass_fields__:
        assert f"`--{field.replace('_', '-')}`" in TEXT, field
    shown = run("serve", "--help").stdout
    assert [flag for flag in sorted(named - {"--json"}) if flag[:20] not in shown] == []


def test_every_field_of_a_request_is_named() -> None:
    for schema in (CompletionRequest, ChatRequest):
        for field in set(schema.model_fields) - {"model", "prompt", "messages", "stream_options"}:
            assert f"`{field}`" in TEXT, field


@pytest.mark.xdist_group("server")
def test_the_routes_and_series_are_those_there_are(server: Server) -> None:
    paths = set(server.http.get("/openapi.json").json()["paths"])
    named = {path.replace("NAME", "{model}") for path in re.findall(r"(?:GET|POST) (/[\w/]*)", TEXT)}
    assert named - {"/openapi", "/"} == paths
    series = set(re.findall(r"phalanx:\w+", TEXT))
    types = re.findall(r"# TYPE (\S+)", server.http.get("/metrics").text)
    assert series == set(types)
