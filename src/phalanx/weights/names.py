"""What names a model, and what is wrong with a name. Imports nothing heavy: a mistyped name is told at once."""

from __future__ import annotations

import re
from difflib import get_close_matches
from pathlib import Path

EMBEDDED = "smollm2"
"""The packaged model."""

_HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")


class WeightError(ValueError):
    """Weights that cannot be used. `problems` lists every reason, and the message shows them all."""

    def __init__(self, *problems: str) -> None:
        self.problems = list(problems)
        super().__init__("\n".join(self.problems))


def is_hub_id(name: str) -> bool:
    """Whether a string has the form `owner/name` or `name`; `./name` is a path."""
    return _HUB_ID.fullmatch(name) is not None


def wrong_name(model: str) -> str | None:
    """Why there can be no model of this name; None for one that lies here, the packaged one, and an `owner/name`."""
    if Path(model).expanduser().exists() or model == EMBEDDED or ("/" in model and is_hub_id(model)):
        return None
    hint = f"; did you mean {EMBEDDED!r}?" if get_close_matches(model, [EMBEDDED]) else ""
    return f"{model!r} is neither a folder, a file, {EMBEDDED!r} nor a hub id (owner/name){hint}"
