"""OpenedModel: whatever a user names as a model, as config, weights, tokenizer and end tokens."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from torch import nn

import phalanx.models
from phalanx.config import ConfigError, EngineConfig
from phalanx.distributed.group import Group
from phalanx.models.base import TransformerModel
from phalanx.models.hf_config import HFConfig, ModelConfigError, read_config, token_ids
from phalanx.models.placement import device_of
from phalanx.models.policy import POLICIES, policy_for
from phalanx.models.serialized import is_serialized, read_manifest
from phalanx.weights import WeightSource, open_source
from phalanx.weights.dummy import DummySource
from phalanx.weights.embedded import pull_smollm2
from phalanx.weights.hub import snapshot
from phalanx.weights.names import EMBEDDED, wrong_name

ENTRY_POINTS = "phalanx.models"
"""The group under which an installed package announces modules that declare models."""


class OpenedModel:
    """A model that has been found and whose config is read; weights come later.

    Args:
        model: a folder (Hugging Face or serialised), a GGUF file, a hub id, "smollm2", an ``nn.Module`` of
            transformers, or anything that ``open_source`` takes together with ``hf_config``.
        hf_config: the config, for sources that carry none.
        tokenizer: a tokenizer, or where to find one; default: the model's own.

    Raises:
        ModelConfigError, WeightError: nothing usable there.
    """

    def __init__(self, model: Any, hf_config: Mapping[str, Any] | None = None, tokenizer: Any = None) -> None:
        self.path: Path | None = None
        self.manifest: dict[str, Any] | None = None
        self.source: WeightSource | None = None
        self._tokenizer = tokenizer
        self.name = model if isinstance(model, str) else type(model).__name__
        if isinstance(model, (str, Path)):
            self.path = locate(str(model))
            self.name = Path(str(model)).name
        if self.path is not None and is_serialized(self.path):
            self.manifest = read_manifest(self.path)
            self.config = HFConfig(hf_config or self.manifest["config"])
            return
        if self.path is not None and self.path.is_dir() and any(self.path.glob("*.json")):
            self.config = HFConfig(hf_config) if hf_config is not None else read_config(self.path)
            return
        self.source = open_source(self.path if self.path is not None else model)
        self.config = HFConfig(hf_config if hf_config is not None else self._carried_config(model))

    def _carried_config(self, model: Any) -> Mapping[str, Any]:
        config = getattr(model, "config", None)
        if isinstance(model, nn.Module) and config is not None:
            return dict(config.to_dict())
        if hasattr(self.source, "hf_config"):
            return dict(self.source.hf_config())  # type: ignore[union-attr]
        raise ModelConfigError(f"{self.name} carries no model config: pass hf_config=")

    def build(self, config: EngineConfig, group: Group) -> tuple[TransformerModel, str]:
        """The model with its parameters, and the name of the policy that built it."""
        load_policies(config)
        if config.load_format == "dummy":
            source = DummySource(dict(self.config.given), device_of(config, group))
            policy = policy_for(self.config)(self.config, source=source)
        elif self.manifest is not None:
            kind = next((p for p in POLICIES.values() if p.__name__ == self.manifest["policy"]), None)
            if kind is None:
                raise ModelConfigError(f"serialised by {self.manifest['policy']}, which is not known here: import it")
            policy = kind(self.config, inference_checkpoint=self.path)
            if config.dtype == "auto":
                config = config.model_copy(update={"dtype": self.manifest["dtype"]})
        else:
            kind = policy_for(self.config)
            if self.source is None:
                self.source = open_source(self.path)
            policy = kind(self.config, source=self.source)
        return policy.build_model(config, group), type(policy).__name__

    def tokenizer(self) -> Any:
        """The tokenizer, None for a model that has none (token ids must be given then).

        Raises:
            ModelConfigError: its files are none that transformers can read.
        """
        if self._tokenizer is None or isinstance(self._tokenizer, (str, Path)):
            self._tokenizer = self._load_tokenizer()
        return self._tokenizer

    def _load_tokenizer(self) -> Any:
        if self._tokenizer is not None:
            return _read_tokenizer(str(self._tokenizer))
        if hasattr(self.source, "tokenizer"):
            return self.source.tokenizer()  # type: ignore[union-attr]
        if self.path is not None and self.path.is_dir() and any(self.path.glob("tokenizer*")):
            return _read_tokenizer(str(self.path))
        return None

    def eos_token_ids(self) -> frozenset[int]:
        """Every id that the config, the generation config or the tokenizer calls an end."""
        found = set(self.config.eos_token_ids)
        generation = self.path / "generation_config.json" if self.path is not None else None
        if generation is not None and generation.is_file():
            try:
                found |= token_ids(json.loads(generation.read_text()).get("eos_token_id"))
            except (OSError, ValueError, AttributeError) as error:
                raise ModelConfigError(f"{generation} cannot be read: {error}") from None
        if self.tokenizer() is not None:
            found |= token_ids(self.tokenizer().eos_token_id)
        return frozenset(found)

    def spec(self) -> str | None:
        """What another process opens to get the same model; None where it lives in this one's memory."""
        return str(self.path.absolute()) if self.path is not None else None


def _read_tokenizer(place: str) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(place)
    except Exception as error:
        # Whatever transformers raises (KeyErrors, errors of its Rust part) is about these files.
        raise ModelConfigError(f"the tokenizer of {place} cannot be read: {type(error).__name__}: {error}") from error


def locate(model: str) -> Path | None:
    """The folder or file of a model's name, pulled first if need be.

    Raises:
        ModelConfigError: there is no such thing.
    """
    wrong = wrong_name(model)
    if wrong is not None:
        raise ModelConfigError(wrong)
    path = Path(model).expanduser()
    if path.exists():
        return path
    return pull_smollm2() if model == EMBEDDED else snapshot(model, None)


def load_policies(config: EngineConfig) -> None:
    """Imports the built-in families, what installed packages announce as entry points ``phalanx.models``, and the
    plugins of a config, so that POLICIES has them.

    Raises:
        ConfigError: one that cannot be imported.
    """
    phalanx.models.load_families()
    for announced in entry_points(group=ENTRY_POINTS):
        try:
            announced.load()
        except (ImportError, AttributeError) as error:
            of = announced.dist.name if announced.dist is not None else "an installed package"
            raise ConfigError(
                f"{of} announces models in {announced.value!r}, which cannot be imported: {error}. Mend or remove it"
            ) from error
    for name in config.plugins:
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise ConfigError(f"plugins: {name!r} cannot be imported: {error}") from error
