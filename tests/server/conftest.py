"""One server of the tiny model for all tests that leave it as it was."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from tests.cli.conftest import run as run
from tests.server.running import Server, serving


@pytest.fixture(scope="session")
def server(tiny_folder: Path) -> Iterator[Server]:
    """It must have no block in use when all tests are done."""
    with serving(tiny_folder, "--tool-format", "hermes") as running:
        yield running
        running.wait_idle()


@pytest.fixture
def client(server: Server) -> openai.OpenAI:
    """OpenAI's own client."""
    return server.client()
