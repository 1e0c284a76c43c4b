"""The command line, run in this process."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from phalanx.cli import app

ENGINE = ["--num-blocks", "64", "--max-num-seqs", "4", "--block-size", "8"]

Run = Callable[..., Result]


@pytest.fixture
def run() -> Run:
    """Runs the ``phalanx`` command with these arguments."""

    def invoke(*arguments: Any, input: str | None = None) -> Result:
        return CliRunner().invoke(app, [str(argument) for argument in arguments], input=input)

    return invoke


def records(text: str) -> list[dict[str, Any]]:
    """JSON lines."""
    return [json.loads(line) for line in text.splitlines()]
