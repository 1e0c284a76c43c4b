"""The config.json that a GGUF file's metadata amounts to."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from phalanx.weights.gguf.names import ARCHITECTURES
from phalanx.weights.source import WeightError

_DEFAULT_THETA = 10_000.0
# The constants of Llama 3 models; their files keep only the frequency factors that follow from them.
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}

# Settings of YaRN that configs of transformers do not have, with the values that change nothing.
_NEUTRAL_YARN = {"attn_factor": 1.0, "yarn_attn_factor": 1.0, "yarn_ext_factor": 1.0, "yarn_log_multiplier": 0.0}


class Metadata:
    """The metadata of one architecture, with errors that name the key."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values
        self.architecture: str = values["general.architecture"]

    def get(self, key: str, default: Any = None) -> Any:
        """The value of `<architecture>.<key>`, one for the whole model."""
        value = self._values.get(f"{self.architecture}.{key}", default)
        if isinstance(value, list):
            raise WeightError(f"{self.architecture}.{key} differs from layer to layer, which is not supported: {value}")
        return value

    def require(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise WeightError(f"the GGUF file lacks the metadata {self.architecture}.{key}")
        return value

    def token_id(self, role: str) -> int | None:
        return self._values.get(f"tokenizer.ggml.{role}_token_id")


def hf_config(
    values: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    rope_factors: torch.Tensor | None,
    dtype: torch.dtype,
) -> dict[str, Any]:
    """The config as transformers 5 writes it, from metadata, the shapes of the HF tensors and `rope_freqs.weight`."""
    meta = Metadata(values)
    names = ARCHITECTURES[meta.architecture]
    heads = meta.require("attention.head_count")
    hidden = meta.require("embedding_length")
    head_dim = meta.get("attention.key_length") or meta.get("rope.dimension_count") or hidden // heads
    for key in ("expert_count", "attention.sliding_window"):
        if meta.get(key):
            raise WeightError(f"{meta.architecture}.{key} = {meta.get(key)} is not supported for GGUF files")
    for key in ("attention.value_length", "rope.dimension_count"):
        if meta.get(key, head_dim) != head_dim:
            raise WeightError(
                f"{meta.architecture}.{key} = {meta.get(key)} beside heads of {head_dim} is not supported"
            )
    return {
        "architectures": [names.model_class],
        "model_type": names.model_type,
        "dtype": str(dtype).removeprefix("torch."),
        "vocab_size": shapes["model.embed_tokens.weight"][0],
        "hidden_size": hidden,
        "intermediate_size": meta.require("feed_forward_length"),
        "num_hidden_layers": meta.require("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": meta.get("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": _short(meta.require("attention.layer_norm_rms_epsilon")),
        "max_position_embeddings": meta.require("context_length"),
        "rope_parameters": rope_parameters(meta, head_dim, rope_factors),
        "attention_bias": "model.layers.0.self_attn.q_proj.bias" in shapes,
        "mlp_bias": "model.layers.0.mlp.up_proj.bias" in shapes,
        "tie_word_embeddings": "lm_head.weight" not in shapes,
        **_special_ids(meta),
    }


def rope_parameters(meta: Metadata, head_dim: int, factors: torch.Tensor | None) -> dict[str, Any]:
    """Rotary settings in the spelling of transformers. Raises WeightError for a kind that a config cannot express."""
    theta = _short(meta.get("rope.freq_base", _DEFAULT_THETA))
    kind = meta.get("rope.scaling.type", "none")
    if factors is not None:
        return {"rope_type": "llama3", "rope_theta": theta, **_llama3(theta, head_dim, factors)}
    if kind == "none":
        return {"rope_type": "default", "rope_theta": theta}
    if kind not in ("linear", "yarn"):
        raise WeightError(f"rope scaling of type {kind!r} cannot be read from a GGUF file: use the original checkpoint")
    scaling = {"rope_type": kind, "rope_theta": theta, "factor": _short(meta.require("rope.scaling.factor"))}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = meta.require("rope.scaling.original_context_length")
        for beta in ("beta_fast", "beta_slow"):
            if (value := meta.get(f"rope.scaling.yarn_{beta}")) is not None:
                scaling[beta] = _short(value)
        for key, neutral in _NEUTRAL_YARN.items():
            if (value := meta.get(f"rope.scaling.{key}", neutral)) != neutral:
                raise WeightError(f"{meta.architecture}.rope.scaling.{key} = {value} is not supported")
    return scaling


def _llama3(theta: float, head_dim: int, factors: torch.Tensor) -> dict[str, float]:
    """The settings from which the frequency factors [head_dim / 2] follow."""
    settings = {"factor": _short(factors.max().item()), **_LLAMA3}
    wavelengths = 2 * math.pi * theta ** (torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    low, high = _LLAMA3["low_freq_factor"], _LLAMA3["high_freq_factor"]
    smooth = ((_LLAMA3["original_max_position_embeddings"] / wavelengths - low) / (high - low)).clamp(0, 1)
    expected = 1 / ((1 - smooth) / settings["factor"] + smooth)
    if factors.shape != expected.shape or not torch.allclose(factors.double(), expected, rtol=1e-3):
        raise WeightError(
            f"the rope frequency factors of the file are not those of Llama 3 with factor {settings['factor']}: "
            "use the original checkpoint"
        )
    return settings


def _special_ids(meta: Metadata) -> dict[str, Any]:
    """Token ids that are there; generation may end with a turn (eot, eom) as well as with eos."""
    ids: dict[str, Any] = {f"{role}_token_id": meta.token_id(role) for role in ("bos", "eos")}
    ids["pad_token_id"] = meta.token_id("padding")
    ends = [end for role in ("eos", "eot", "eom") if (end := meta.token_id(role)) is not None]
    if len(set(ends)) > 1:
        ids["eos_token_id"] = list(dict.fromkeys(ends))
    return {key: value for key, value in ids.items() if value is not None}


def _short(value: float) -> float:
    """The shortest decimal that is the same float32, which is what the original config said: 1e-05, not 9.99..e-06."""
    as_float32 = torch.tensor(value, dtype=torch.float32)
    return next(
        (short for digits in range(1, 10) if torch.tensor(short := float(f"{value:.{digits}g}")) == as_float32), value
    )
