"""The command line in this process, and a tiny model to run it on."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from phalanx.cli import app
from tests.models.tiny import llama, llama_config, save
from tests.tiny_tokenizer import VOCAB_SIZE, tiny_tokenizer

ENGINE = ["--num-blocks", "64", "--max-num-seqs", "4", "--block-size", "8"]

Run = Callable[..., Result]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder of a tiny random Llama with a chat template."""
    folder = tmp_path_factory.mktemp("tiny")
    save(llama(llama_config(vocab_size=VOCAB_SIZE, max_position_embeddings=256), seed=3), folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def run() -> Run:
    """Runs the ``phalanx`` command with these arguments."""

    def invoke(*arguments: Any, input: str | None = None) -> Result:
        return CliRunner().invoke(app, [str(argument) for argument in arguments], input=input)

    return invoke


def records(text: str) -> list[dict[str, Any]]:
    """JSON lines."""
    return [json.loads(line) for line in text.splitlines()]
