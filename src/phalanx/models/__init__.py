"""The model kit and the model families.

A model is declared as Parameter -> LayerContainer -> Model -> Policy; ``POLICIES`` finds it by its ``model_type``.
"""

from phalanx.models.container import LayerContainer
from phalanx.models.container_map import ContainerMap
from phalanx.models.hf_config import HFConfig, ModelConfigError, read_config
from phalanx.models.parameter import (
    DeclarationError,
    InferenceParameter,
    ParameterBase,
    ParametrizedList,
    ParamList,
)

__all__ = [
    "POLICIES",
    "ContainerMap",
    "DeclarationError",
    "HFConfig",
    "InferenceParameter",
    "InferencePolicy",
    "LayerContainer",
    "ModelConfigError",
    "ParamList",
    "ParameterBase",
    "ParametrizedList",
    "TransformerModel",
    "load_families",
    "read_config",
]

from phalanx.models.base import TransformerModel
from phalanx.models.policy import POLICIES, InferencePolicy

FAMILIES = (
    "exaone4",
    "exaone4_5",
    "falcon",
    "gemma2",
    "gemma3",
    "gpt2",
    "gpt_neox",
    "llama",
    "mistral",
    "mixtral",
    "olmo2",
    "opt",
    "phi",
    "phi3",
    "qwen",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_moe",
    "stablelm",
)
"""Modules of this package that declare a family each."""


def load_families() -> None:
    """Imports the built-in families, so that POLICIES has them beside those of the user."""
    import importlib

    for name in FAMILIES:
        importlib.import_module(f"phalanx.models.{name}")
