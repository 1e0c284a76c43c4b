"""What of a model can be cut: its weights by name and shape, and the attention heads that they belong to."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from torch import nn

from phalanx.layout.weight import AttentionShape, Weight
from phalanx.parallel.layers import is_conv1d, is_linear

_ATTENTION_NAME = re.compile(r"^((self|cross|encoder)_?)?(attn|attention)$", re.IGNORECASE)
_NORM_NAME = re.compile(r"norm|(^|_)ln(_|\d|$)", re.IGNORECASE)


def inventory(model: nn.Module) -> list[Weight]:
    """Every weight that a rule may name, each parameter once (a tied one under its first name)."""
    config = text_config(model)
    attention = None if config is None else attention_shape(config)
    seen: set[int] = set()
    found = []
    for path, module, name, parameter in _parameters(model):
        kind = _kind(path, module, name, parameter)
        if kind is None or id(parameter) in seen:
            continue
        seen.add(id(parameter))
        inside = attention if attention_path(path) is not None else None
        full = f"{path}.{name}" if path else name
        has_bias = isinstance(getattr(module, "bias", None), nn.Parameter)
        found.append(Weight(full, tuple(parameter.shape), kind, has_bias=has_bias, attention=inside))
    return found


def tied_names(model: nn.Module) -> dict[str, str]:
    """Every further name of a parameter that has several, and the first one."""
    first: dict[int, str] = {}
    tied = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) in first:
            tied[name] = first[id(parameter)]
        else:
            first[id(parameter)] = name
    return tied


def attention_path(path: str) -> str | None:
    """The innermost module on `path` that is an attention block, by its name; None outside of one."""
    parts = path.split(".")
    for end in range(len(parts), 0, -1):
        if _ATTENTION_NAME.match(parts[end - 1]):
            return ".".join(parts[:end])
    return None


def text_config(model: nn.Module) -> Any:
    """The transformers config of the model's text part; None for a module that has no config."""
    config = getattr(model, "config", None)
    if config is None or not hasattr(config, "model_type"):
        return None
    get = getattr(config, "get_text_config", None)
    return config if get is None else get(decoder=True)


def model_type(model: nn.Module) -> str | None:
    """The `model_type` of the model's text part."""
    config = text_config(model)
    return None if config is None else config.model_type


def attention_shape(config: Any) -> AttentionShape | None:
    """The head counts of a transformers config, whatever the model calls them; None where it has no heads."""
    heads = _first(config, "num_attention_heads", "n_heads", "n_head", "num_heads", "attention_heads")
    if not isinstance(heads, int):
        return None
    hidden = _first(config, "hidden_size", "n_embd", "d_model")
    head_dim = _first(config, "head_dim", "kv_channels") or (hidden // heads if isinstance(hidden, int) else None)
    if head_dim is None:
        return None
    return AttentionShape(heads, _kv_heads(config, heads), head_dim, _first(config, "v_head_dim"))


def _kv_heads(config: Any, heads: int) -> int:
    # Falcon's and BigCode's `multi_query` says one KV head, whatever a stored count says; Falcon's newer layout has
    # a count of its own.
    if getattr(config, "new_decoder_architecture", False):
        return int(config.num_kv_heads)
    if getattr(config, "multi_query", False):
        return 1
    if getattr(config, "multi_query_attention", False):
        return int(config.multi_query_group_num)
    if config.model_type in ("falcon", "gpt_bigcode"):
        return heads
    nested = getattr(config, "attn_config", None)
    nested_count = _first(nested, "kv_n_heads") if nested is not None else None
    return int(_first(config, "num_key_value_heads", "num_kv_heads", "kv_n_heads") or nested_count or heads)


def _first(config: Any, *names: str) -> Any:
    for name in names:
        value = getattr(config, name, None)
        if value is not None:
            return value
    return None


def _parameters(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, nn.Parameter]]:
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            yield path, module, name, parameter


def _kind(path: str, module: nn.Module, name: str, parameter: nn.Parameter) -> Any:
    """The kind of a weight, None for a bias, which goes with its weight."""
    if parameter.dim() == 3 or (path.endswith("experts.mlp") and name in ("w1", "v1", "w2")):
        return "experts"
    if name == "bias" and hasattr(module, "weight"):
        return None
    if name != "weight":
        return "other"
    if parameter.dim() == 2:
        if isinstance(module, nn.Embedding):
            return "embedding"
        if is_linear(module):
            return "linear"
        return "conv1d" if is_conv1d(module) else "other"
    return "norm" if parameter.dim() == 1 and _NORM_NAME.search(type(module).__name__) else "other"
