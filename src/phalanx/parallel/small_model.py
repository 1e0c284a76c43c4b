"""A small random model of the same architecture, on which rules are tried before they touch the real one."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from phalanx.layout.rules import LayerSpec, PartitionConfig
from phalanx.parallel.inventory import attention_shape, text_config

_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_HIDDEN = ("hidden_size", "n_embd", "d_model", "word_embed_proj_dim")
_MLP = (
    "intermediate_size",
    "ffn_dim",
    "n_inner",
    "ffn_hidden_size",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
)
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_SMALL_VOCAB = 67
_SMALL_LAYERS = 2
_MOST_EXPERTS = 8
_MANY_HEADS = 64


@dataclass(frozen=True)
class SmallModel:
    """The small model in float64, the sizes that its config changed, and the vocabulary that its tokens come from."""

    model: nn.Module
    sizes: Mapping[int, int]
    vocab_size: int

    def rescaled(self, rules: PartitionConfig | None, names: list[str]) -> PartitionConfig | None:
        """`rules` for the small model: without those for layers that it lacks, with the integers of shapes rescaled."""
        if rules is None:
            return None
        kept = [spec for spec in rules.layer_specs if any(spec.matching(name) for name in names)]
        return replace(rules, layer_specs=tuple(self._rescaled_spec(spec) for spec in kept))

    def _rescaled_spec(self, spec: LayerSpec) -> LayerSpec:
        return replace(spec, shape=self._rescaled_sizes(spec.shape), view=self._rescaled_sizes(spec.view))

    def _rescaled_sizes(self, sizes: Any) -> Any:
        if isinstance(sizes, tuple):
            return tuple(self._rescaled_sizes(size) for size in sizes)
        return self.sizes.get(sizes, sizes)


def small_model(model: nn.Module, exact: bool = False) -> SmallModel | None:
    """A model of `model`'s class and config with few layers and narrow heads, but its true head counts.

    `exact`: one layer, and every width as it is. None for a model that no transformers config describes, or whose class
    cannot be built from a changed one. The caller's random state is not touched.
    """
    config = getattr(model, "config", None)
    text = text_config(model)
    if config is None or text is None or not hasattr(type(model), "_from_config"):
        return None
    config = copy.deepcopy(config)
    sizes: dict[int, int] = {}
    small = _text_part(config)
    _shrink(small, sizes, exact)
    # The plain loop over experts works in every dtype.
    config._experts_implementation = "eager"
    for name in ("_attn_implementation", "attn_implementation"):
        if hasattr(config, name):
            config._attn_implementation = (
                "eager" if getattr(config, name) == "flash_attention_2" else getattr(config, name)
            )
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            build: Any = type(model)
            built = build._from_config(config, dtype=torch.float32).to("cpu", torch.float64).train()
            _fill(built)
    except (ValueError, TypeError, AttributeError, RuntimeError, ZeroDivisionError):
        return None
    return SmallModel(built, sizes, small.vocab_size)


def shrunk_config(config: Any, window: int) -> Any:
    """A copy of a transformers config with few layers and narrow heads, and with windows of `window` tokens if any."""
    config = copy.deepcopy(config)
    small = _text_part(config)
    _shrink(small, {}, exact=False)
    if isinstance(getattr(small, "sliding_window", None), int):
        small.sliding_window = window
    config._experts_implementation = "eager"
    return config


def _text_part(config: Any) -> Any:
    get = getattr(config, "get_text_config", None)
    return config if get is None else get(decoder=True)


def _shrink(config: Any, sizes: dict[int, int], exact: bool) -> None:
    shape = attention_shape(config)
    _set(config, _LAYERS, 1 if exact else _SMALL_LAYERS)
    for name, value in list(vars(config).items()):
        if isinstance(value, list) and name == "layer_types":
            setattr(config, name, value[: 1 if exact else _SMALL_LAYERS])
    if getattr(config, "vocab_size", 0) > _SMALL_VOCAB:
        config.vocab_size = _SMALL_VOCAB
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        value = getattr(config, name, None)
        if isinstance(value, list) or (isinstance(value, int) and value >= config.vocab_size):
            setattr(config, name, 0)
    for name in vars(config):
        if "dropout" in name or name.endswith(("_pdrop", "_drop")):
            setattr(config, name, 0.0 if isinstance(getattr(config, name), float) else getattr(config, name))
    if exact or shape is None:
        return
    narrow = _narrow_head(config, shape.num_heads)
    hidden = shape.num_heads * narrow
    sizes.update(
        {
            shape.num_heads * shape.head_dim: hidden,
            shape.num_kv_heads * shape.head_dim: shape.num_kv_heads * narrow,
            shape.head_dim: narrow,
        }
    )
    old_hidden = next(value for name in _HIDDEN if isinstance(value := getattr(config, name, None), int))
    sizes[old_hidden] = hidden
    for name in _MLP:
        value = getattr(config, name, None)
        if isinstance(value, int) and value > 0:
            setattr(config, name, sizes.setdefault(value, _narrow_mlp(value, old_hidden, hidden)))
    _set(config, _HIDDEN, hidden)
    if isinstance(getattr(config, "head_dim", None), int) and "head_dim" in vars(config):
        config.head_dim = narrow
    for name in _EXPERTS:
        value = getattr(config, name, None)
        if isinstance(value, int) and value > _MOST_EXPERTS:
            setattr(
                config, name, sizes.setdefault(value, max(_MOST_EXPERTS, getattr(config, "num_experts_per_tok", 1)))
            )


def _narrow_head(config: Any, heads: int) -> int:
    """The smallest head whose rotated part is an even number of elements; smaller still where there are many."""
    rope = getattr(config, "rope_parameters", None) or {}
    fraction = rope.get("partial_rotary_factor") or getattr(config, "partial_rotary_factor", None) or 1.0
    fraction = getattr(config, "rotary_pct", None) or fraction
    for narrow in (4, 8, 16, 32, 64) if heads > _MANY_HEADS else (8, 16, 32, 64):
        rotated = int(narrow * fraction)
        if rotated >= 2 and rotated % 2 == 0:
            return narrow
    return 128


def _narrow_mlp(value: int, old_hidden: int, hidden: int) -> int:
    # An MLP of a whole multiple of the hidden size stays one: some models compute it so.
    if value % old_hidden == 0:
        return value // old_hidden * hidden
    return max(16, 2 * hidden + 8)


def _set(config: Any, names: tuple[str, ...], value: int) -> None:
    for name in names:
        if isinstance(getattr(config, name, None), int):
            setattr(config, name, value)


def _fill(model: nn.Module) -> None:
    """Values in which every weight matters: fresh models have zero biases, unit norms and nearly equal logits."""
    for parameter in model.parameters():
        with torch.no_grad():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
            else:
                parameter.copy_(torch.randn_like(parameter) * parameter.shape[-1] ** -0.5)
