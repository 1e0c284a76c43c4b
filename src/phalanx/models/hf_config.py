"""A Hugging Face ``config.json``, read in one place: old and new spellings, nested text configs, no remote code."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch

from phalanx.config import parse_dtype


class ModelConfigError(ValueError):
    """A model config that is unreadable or asks for something that is not supported; the message names it."""


class AbsentValueError(ModelConfigError, AttributeError):
    """A value that a config does not have; also an AttributeError, so that ``getattr(config, name, default)`` works."""


class HFConfig(Mapping[str, Any]):
    """The values of one model's config, with transformers' defaults for what the file leaves out.

    A mapping that is also read by attribute; the text part of a multimodal config lies on top of it.

    Args:
        values: as in ``config.json`` (a torch.dtype is taken for its name); not changed.

    Raises:
        ModelConfigError: no ``model_type``, or a value that JSON cannot hold.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        given = _as_json(values)
        model_type = given.get("model_type")
        if not isinstance(model_type, str):
            raise ModelConfigError(
                f"the model config has no `model_type` (given {model_type!r}): is this a transformers config.json?"
            )
        text = given.pop("text_config", None)
        text_type = None
        if isinstance(text, dict):
            text_type = text.get("model_type")
            given = {**given, **text, "model_type": model_type}
        self._given = given
        self._values = {**_library_defaults(model_type, text_type), **given}

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
            raise AbsentValueError(f"the config of model_type {self['model_type']!r} has no `{name}`") from None

    def integer(self, name: str) -> int:
        """A value that must be a whole number.

        Raises:
            ModelConfigError: it is absent or something else.
        """
        value = getattr(self, name)
        if not isinstance(value, int) or isinstance(value, bool):
            raise ModelConfigError(f"the config says {name}={value!r}: expected a whole number")
        return value

    def boolean(self, name: str) -> bool:
        """A value that must be true or false, false where it is absent or null; ModelConfigError for anything else."""
        value = self.get(name)
        if value is not None and not isinstance(value, bool):
            raise ModelConfigError(f"the config says {name}={value!r}: expected true or false")
        return bool(value)

    def number(self, name: str) -> float:
        """A value that must be a number; ModelConfigError for anything else."""
        value = getattr(self, name)
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise ModelConfigError(f"the config says {name}={value!r}: expected a number")
        return float(value)

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


def _as_json(values: Mapping[str, Any]) -> dict[str, Any]:
    """A deep copy as JSON holds it, so that a config in memory equals itself written and read."""

    def name_of(value: Any) -> str:
        if isinstance(value, torch.dtype):
            return str(value).removeprefix("torch.")
        raise TypeError(f"a {type(value).__name__} ({value!r}) is no JSON value")

    try:
        result: dict[str, Any] = json.loads(json.dumps(dict(values), default=name_of))
    except (TypeError, ValueError) as error:
        raise ModelConfigError(f"the model config is not like a config.json: {error}") from None
    return result


@cache
def _library_defaults(model_type: str, text_type: str | None) -> Mapping[str, Any]:
    """What transformers assumes for keys that a config of this type leaves out; {} for types it does not know.

    Args:
        text_type: the type that a nested text config names; None where there is none.
    """
    from transformers import CONFIG_MAPPING

    if model_type not in CONFIG_MAPPING:
        return {}
    config = CONFIG_MAPPING[model_type]()
    text = CONFIG_MAPPING[text_type]() if text_type and text_type in CONFIG_MAPPING else config.get_text_config()
    defaults = {**_declared(config), **_declared(text)}
    # Rope of the default instance is for its own sizes; only the numbers that do not depend on them are defaults.
    rope = getattr(text, "rope_parameters", None)
    if isinstance(rope, Mapping):
        kept = {key: rope[key] for key in ("rope_theta", "partial_rotary_factor") if key in rope}
        defaults = {**kept, **defaults}
    return defaults


def _declared(config: Any) -> dict[str, Any]:
    """The defaults that a config class states.

    A value of the instance that the class leaves None (``head_dim``, ``num_key_value_heads``, ``layer_types``, ...) is
    derived from the other defaults, and would be wrong beside the values of a file.
    """
    stated = {key: value for key, value in config.to_dict().items() if getattr(type(config), key, None) is not None}
    return {key: value for key, value in stated.items() if key not in ("model_type", "rope_parameters", "text_config")}
