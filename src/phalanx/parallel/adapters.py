"""Adapters that PEFT has put into a model before it was cut: which of them can be cut with it, and how they follow.

    column layer   y += B(A(x))   A whole, B cut by output features: entered between them, where the tensor is smallest
    row layer      y += B(A(x))   A cut by input features, its sums added up over the ranks, B whole
    head           as a column layer, by token ids
    embedding      A and B whole: small beside the embedding itself

So no factor's gradient is a part only. A layer that is trained beside its original (`modules_to_save`) is cut as that.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.layout.decide import Decision
from phalanx.layout.roles import adapter_factor
from phalanx.parallel.layers import CutLayer, RowLinear

_WRAPPER = re.compile(r"\.(base_layer|original_module|modules_to_save\.[^.]+)(?=\.|$)")
_FACTOR = re.compile(r"\.lora_[AB]\.[^.]+(?=\.|$)")


def adapted_path(path: str) -> str:
    """The path that a wrapped module had before it was wrapped; another path as it is."""
    return _WRAPPER.sub("", path)


def base_model(model: Any) -> Any:
    """The model that PEFT has wrapped (its adapted layers stay in it); another model itself."""
    inner = getattr(model, "get_base_model", None)
    return model if inner is None or not hasattr(model, "peft_config") else inner()


def adapted_decision(name: str, decisions: Mapping[str, Decision]) -> Decision | None:
    """What is decided for the weight that a factor of an adapter belongs to; None for another parameter."""
    if adapter_factor(name) is None:
        return None
    return decisions.get(_FACTOR.sub(".base_layer", name).rpartition(".")[0] + ".weight")


def beneath(module: nn.Module) -> nn.Module:
    """The layer that an adapter wraps; another module itself."""
    return module.base_layer if _is_adapted(module) else module  # type: ignore[return-value]


def dropouts_on_parts(model: nn.Module) -> list[nn.Module]:
    """The dropouts of adapters whose input lies in parts over the ranks."""
    return [
        dropout
        for module in model.modules()
        if _is_adapted(module) and isinstance(module.base_layer, RowLinear) and not module.base_layer.cut.split
        for dropout in module.lora_dropout.children()  # type: ignore[union-attr]
        if getattr(dropout, "p", 0) > 0
    ]


def drops(model: nn.Module) -> bool:
    """Whether an adapter drops out anything."""
    adapted = [module for module in model.modules() if _is_adapted(module)]
    return any(getattr(each, "p", 0) > 0 for module in adapted for each in getattr(module, "lora_dropout", {}).values())


def follow(decisions: Mapping[str, Decision]) -> dict[str, Decision]:
    """`decisions`, with the second factor of an adapted head cut by token ids as the head is."""
    found = dict(decisions)
    for name in decisions:
        head = adapted_decision(name, decisions)
        if adapter_factor(name) == "B" and head is not None and head.style == "vocab":
            found[name] = replace(head, source=f"as the head that it adapts: {head.source}")
    return found


def check_adapters(model: nn.Module, decisions: Mapping[str, Decision]) -> None:
    """Raises ValueError for an adapter on a cut layer that cannot be cut with it, by its name."""
    configs = getattr(model, "peft_config", None)
    for name, config in configs.items() if isinstance(configs, Mapping) else ():
        if getattr(config, "is_prompt_learning", False):
            raise ValueError(
                f"the adapter {name!r} is {_kind(config)}: it adds tokens or keys for all heads, which a cut model has "
                "not. Use LoRA, or tensor_parallel 1"
            )
    cut = {name.rpartition(".")[0] for name, decision in decisions.items() if decision.is_cut}
    for path, module in model.named_modules():
        if not _is_adapted(module):
            continue
        variants = [type(each).__name__ for each in dict(getattr(module, "lora_variant", {})).values()]
        of_lora = type(module).__module__ == "peft.tuners.lora.layer"
        is_cut = any(each.startswith(f"{path}.") for each in cut)
        if variants or not of_lora or (is_cut and type(module).__name__ not in ("Linear", "Embedding")):
            what = ", ".join(variants) or f"{type(module).__module__}.{type(module).__name__}"
            raise ValueError(
                f"{path} has an adapter that cannot be cut over ranks ({what}): plain LoRA of linear layers and "
                "embeddings can (no DoRA or other variants, no target_parameters, no other methods). Change the "
                "adapter's config, leave this layer out of its targets, or use tensor_parallel 1"
            )


def whole_padding(model: nn.Module) -> None:
    """Adapted embeddings look their own factor up with token ids of the whole vocabulary, of which the cut layer knows
    its own rows only: no gradient for the padding token is theirs to see to. Call it before the model is cut."""
    for module in model.modules():
        if _is_adapted(module) and isinstance(module.base_layer, nn.Embedding):
            padding = module.base_layer.padding_idx
            module.__class__ = type(type(module).__name__, (_WholeLookup, type(module)), {})
            module.whole_padding_idx = padding  # type: ignore[assignment]


class _WholeLookup(nn.Module):
    whole_padding_idx: int | None

    def _embed(self, input: Tensor, weight: Tensor, *hooks: Any, **more: Any) -> Tensor:
        # PEFT's own takes `padding_idx` of the layer beneath.
        if hooks or more.get("input_fn") or more.get("output_fn"):
            raise ValueError("an adapted embedding of a cut model is looked up without hooks of the adapter")
        return F.embedding(input, weight, padding_idx=self.whole_padding_idx)


class StillThere:
    """Before each forward: that no layer was wrapped or replaced since the model was cut."""

    def __init__(self, model: nn.Module) -> None:
        self._places = [
            (path, module, name, child)
            for path, module in model.named_modules()
            for name, child in module.named_children()
            if isinstance(child, CutLayer)
        ]

    def __call__(self, model: nn.Module, args: tuple[Any, ...]) -> None:
        for path, module, name, child in self._places:
            if module._modules.get(name) is not child:
                raise RuntimeError(
                    f"{path}.{name} was wrapped or replaced after the model was cut: it would compute on one rank's "
                    "part as if it were the whole. Add adapters (get_peft_model) first, then call parallelize or "
                    "initialize with the adapted model"
                )


def _is_adapted(module: nn.Module) -> bool:
    return isinstance(getattr(module, "base_layer", None), nn.Module) and hasattr(module, "adapter_layer_names")


def _kind(config: Any) -> str:
    kind = getattr(config, "peft_type", type(config).__name__)
    return str(getattr(kind, "value", kind))
