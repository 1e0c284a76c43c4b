"""A tiny model with a tokenizer, made once, and an LLM of it on demand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from phalanx import LLM
from tests.tiny_tokenizer import VOCAB_SIZE


@pytest.fixture
def make_llm(tiny_folder: Path) -> Iterator[Callable[..., LLM]]:
    """Makes LLMs of the tiny model, closed at the end; each must leave no block in use."""
    made: list[LLM] = []

    def make(**settings: Any) -> LLM:
        made.append(LLM(tiny_folder, **{"num_blocks": 64, "block_size": 4, **settings}))
        return made[-1]

    yield make
    for llm in made:
        if not llm.has_work:
            llm.core.check_idle()
        llm.close()


@pytest.fixture
def prompts() -> list[list[int]]:
    """Random prompts of 1 to 40 tokens."""
    generator = torch.Generator().manual_seed(0)
    lengths = [1, 2, 3, 4, 5, 8, 12, 16, 17, 23, 31, 40]
    return [torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist() for length in lengths]
