"""Settings for every test, made before torch is imported, and the model that most of them run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

# Two test workers share the machine, and tests start ranks of their own: one thread each (children inherit it).
os.environ["OMP_NUM_THREADS"] = "1"

# Triton kernels are interpreted where there is no GPU: decided before they are defined.
if not Path("/dev/nvidia0").exists():
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(autouse=True)
def same_numbers() -> None:
    """A test draws the same random numbers in every run."""
    import random

    import numpy as np
    import torch

    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder of a tiny random Llama whose greedy answers vary, with a tokenizer and a chat template."""
    from tests.models.tiny import llama, llama_config, save
    from tests.tiny_tokenizer import VOCAB_SIZE, tiny_tokenizer

    folder = tmp_path_factory.mktemp("tiny")
    save(llama(llama_config(vocab_size=VOCAB_SIZE, max_position_embeddings=256), seed=3), folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keeps tests of one ``xdist_group`` on one worker: pytest 9.2 does not read the ids that pytest-xdist 3.8 writes,
    so that each worker would start the group's server and ranks for itself."""
    for item in items:
        grouped = vars(item).get("_nodeid")
        if grouped is not None and item.nodeid != grouped:
            item._id = type(item._id).parse(grouped)  # type: ignore[attr-defined]
