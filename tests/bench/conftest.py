"""A small workload to measure."""

from __future__ import annotations

import pytest

from phalanx.bench.workload import Plan, draw
from tests.tiny_tokenizer import VOCAB_SIZE


@pytest.fixture
def plan() -> Plan:
    """Ten prompts: a whole padded batch and a rest."""
    workload = draw(10, range(1, 30), range(1, 12), VOCAB_SIZE, seed=1)
    return Plan("throughput", draw(2, range(1, 30), range(1, 12), VOCAB_SIZE, seed=2), workload, 1)
