"""The code blocks of docs/training.md on two ranks, in their order, as one script; see `tests.training.ranks`."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[1] / "docs" / "training.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)


def run(number: int, names: dict[str, Any]) -> None:
    folder = os.environ["TRAINING_DOCS_MODELS"]
    code = BLOCKS[number].replace("path/to/", f"{folder}/")
    printed: list[str] = []
    names["print"] = lambda *parts: printed.append(" ".join(map(str, parts)))
    exec(compile(code, f"{PAGE.name}, block {number}", "exec"), names)
    names.setdefault("printed", []).extend(printed)


def check(names: dict[str, Any]) -> None:
    """What the page says that its blocks print."""
    cut, update, refusal, inputs = names["printed"]
    assert cut.startswith("(64, 64) -> (32, 64) because of ")
    assert update.startswith("1 [")
    assert "query_key_value.weight is cut as layer_specs[0]" in refusal and "each head's" in refusal
    assert "input_ids, labels on ranks [1] is not what rank 0 got" in inputs


def cases(world: int) -> dict[str, Callable[[], None]]:
    names: dict[str, Any] = {"__name__": "training_guide"}
    blocks = {f"block {number}": functools.partial(run, number, names) for number in range(len(BLOCKS))}
    return {**blocks, "what they print": functools.partial(check, names)}
