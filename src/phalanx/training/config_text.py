"""A training config as it is given (a dict, a path, base64 text) into a dict of its own."""

from __future__ import annotations

import base64
import binascii
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from phalanx.config import ConfigError


def load_config(config: Mapping[str, Any] | str | os.PathLike[str]) -> dict[str, Any]:
    """The config as nested dicts that belong to the caller of this function: what was given is never changed.

    A string is the path of a JSON file, or JSON text in (URL-safe) base64 as DeepSpeed's launchers pass it on. Plain
    JSON only: DeepSpeed also reads Hjson (comments, unquoted keys). Raises ConfigError for a file or text that is
    neither, for JSON that does not parse (with its line), and for a key that stands twice in one block.
    """
    if isinstance(config, Mapping):
        return {key: _own(value) for key, value in config.items()}
    if not isinstance(config, (str, os.PathLike)):
        raise ConfigError(
            f"a training config is a dict, the path of a JSON file or base64 text, not {type(config).__name__}"
        )
    path = Path(config)
    try:
        found = path.is_file()
    except OSError:  # base64 text is longer than any file name
        found = False
    if found:
        return _parse(path.read_text(encoding="utf-8"), str(path))
    text = os.fspath(config)
    try:
        decoded = base64.b64decode(text.translate(str.maketrans("-_", "+/")), validate=True).decode()
    except (binascii.Error, UnicodeDecodeError, ValueError):
        shown = text if len(text) <= 80 else f"{text[:77]}..."
        raise ConfigError(f"{shown!r} is neither the path of a file nor a training config in base64") from None
    return _parse(decoded, "the base64 text")


def _own(value: Any) -> Any:
    """A copy of the containers; what they hold (a process group) stays the same object."""
    if isinstance(value, Mapping):
        return {key: _own(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_own(item) for item in value]
    return value


def _parse(text: str, source: str) -> dict[str, Any]:
    try:
        value = json.loads(text, object_pairs_hook=_no_key_twice)
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"{source}, line {error.lineno}: {error.msg}; a training config is plain JSON: "
            "quoted keys, no comments, no trailing commas (DeepSpeed's Hjson is not read)"
        ) from None
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{source} holds a JSON {type(value).__name__}, expected an object")
    return value


def _no_key_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = [key for key, _ in pairs]
    twice = sorted({key for key in keys if keys.count(key) > 1})
    if twice:
        raise ConfigError(f"{', '.join(map(repr, twice))} stands more than once in one block; keep one")
    return dict(pairs)
