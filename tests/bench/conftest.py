"""A tiny model to measure."""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx.bench.workload import Plan, draw
from tests.models.tiny import llama, llama_config, save
from tests.tiny_tokenizer import VOCAB_SIZE, tiny_tokenizer


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder of a tiny random Llama."""
    folder = tmp_path_factory.mktemp("tiny")
    save(llama(llama_config(vocab_size=VOCAB_SIZE, max_position_embeddings=256), seed=3), folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def plan() -> Plan:
    """Ten prompts: a whole padded batch and a rest."""
    workload = draw(10, range(1, 30), range(1, 12), VOCAB_SIZE, seed=1)
    return Plan("throughput", draw(2, range(1, 30), range(1, 12), VOCAB_SIZE, seed=2), workload, 1)
