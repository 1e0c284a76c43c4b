"""A tiny Llama, made once, and a registry of policies that tests may change."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from phalanx.models import POLICIES, load_families
from tests.models.tiny import llama, llama_config, save


@pytest.fixture(scope="session")
def tiny_llama() -> Any:
    """transformers' module of `llama_config()`; not to be changed."""
    return llama(llama_config())


@pytest.fixture(scope="session")
def tiny_folder(tiny_llama: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same as a Hugging Face folder; not to be changed."""
    return save(tiny_llama, tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture
def policies() -> Iterator[dict[str, Any]]:
    """POLICIES with the built-in families; what a test defines is forgotten afterwards."""
    load_families()
    before = dict(POLICIES)
    yield POLICIES
    POLICIES.clear()
    POLICIES.update(before)
