"""A Hugging Face ``config.json``, read in one place: old and new spellings, nested text configs, no remote code."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from phalanx.config import parse_dtype


class ModelConfigError(ValueError):
    """A model config that is unreadable or asks for something that is not supported; the message names it."""


class HFConfig(Mapping[str, Any]):
    """The values of one model's config, with transformers' defaults for what the file leaves out.

    A mapping that is also read by attribute; the text part of a multimodal config lies on top of it.

    Args:
        values: as in ``config.json``; not changed.

    Raises:
        ModelConfigError: no ``model_type``.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        given = dict(values)
        if not isinstance(given.get("model_type"), str):
            raise ModelConfigError("the model config has no `model_type`: is this a transformers config.json?")
        text = given.pop("text_config", None)
        if isinstance(text, Mapping):
            given = {**given, **text, "model_type": given["model_type"]}
        self._given = given
        self._values = {**_library_defaults(given["model_type"]), **given}

    def __getitem__(self, key: str) -> Any:
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        try:
            return self._values[name]
        except KeyError:
            raise ModelConfigError(f"the config of model_type {self['model_type']!r} has no `{name}`") from None

    @property
    def given(self) -> Mapping[str, Any]:
        """Only what the file itself says, text part on top."""
        return self._given

    @property
    def dtype(self) -> torch.dtype | None:
        """The checkpoint's dtype (``dtype``, formerly ``torch_dtype``), None where the config names none."""
        name = self._given.get("dtype") or self._given.get("torch_dtype")
        return None if name in (None, "auto") else parse_dtype(name)

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Every id that the config calls ``eos_token_id``."""
        return token_ids(self._values.get("eos_token_id"))


def token_ids(value: Any) -> frozenset[int]:
    """``eos_token_id`` in any of its spellings (an int, a list, None) as a set."""
    if value is None:
        return frozenset()
    return frozenset(int(item) for item in (value if isinstance(value, (list, tuple)) else [value]))


def read_config(folder: str | Path) -> HFConfig:
    """The config of a model folder.

    Raises:
        ModelConfigError: ``config.json`` is absent or not a JSON object.
    """
    path = Path(folder) / "config.json"
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelConfigError(f"{path} does not exist: a model folder needs a config.json") from None
    except (OSError, ValueError) as error:
        raise ModelConfigError(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(values, dict):
        raise ModelConfigError(f"{path} holds a {type(values).__name__}, expected a JSON object")
    return HFConfig(values)


def _library_defaults(model_type: str) -> dict[str, Any]:
    """What transformers assumes for keys that a config of this type leaves out; {} for types it does not know."""
    from transformers import CONFIG_MAPPING

    if model_type not in CONFIG_MAPPING:
        return {}
    config = CONFIG_MAPPING[model_type]()
    text = config.get_text_config()
    defaults = {**config.to_dict(), **text.to_dict()}
    # The rope of a default instance describes its own sizes; a file that says nothing has plain rope at its theta.
    rope = defaults.pop("rope_parameters", None)
    if isinstance(rope, Mapping) and "rope_theta" in rope:
        defaults.setdefault("rope_theta", rope["rope_theta"])
    # Derived from the default instance's sizes, not from the file's.
    for key in ("head_dim", "num_key_value_heads", "dtype", "torch_dtype", "architectures", "model_type"):
        defaults.pop(key, None)
    return defaults
