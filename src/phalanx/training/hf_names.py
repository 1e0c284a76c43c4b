"""From a module's tensors to those of a Hugging Face folder: other names, and single experts instead of fused ones."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.parallel.adapters import adapted_path


def json_of(config: Any) -> dict[str, Any] | None:
    """A config of transformers as JSON values; None for anything else."""
    to_json = getattr(config, "to_json_string", None)
    if to_json is None:
        return None
    found: dict[str, Any] = json.loads(to_json(use_diff=False))
    return found


def stored_tensors(model: nn.Module, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """`tensors` of the state of `model`, a model of transformers, as its published checkpoints name and shape them.

    A tensor is converted by itself, as it comes. Where transformers could only convert several together, the module's
    own names stay, which its `from_pretrained` reads as well. Tensors of another module pass as they are.
    """
    convert = _conversion(model)
    ignored = getattr(model, "_keys_to_ignore_on_save", None) or ()
    for name, value in tensors:
        if name in ignored:
            continue
        if convert is None:
            yield name, value
        else:
            yield from convert(model, {name: value}).items()


def _conversion(model: Any) -> Any:
    """What converts a part of a state dict; None where there is nothing to convert, or no way to do it in parts."""
    try:
        from transformers import PreTrainedModel
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:  # a transformers that keeps the stored names, or none
        return None
    if not isinstance(model, PreTrainedModel):
        return None
    # Under the names of the model alone: an adapter is merged before its model is written.
    hollow = {
        f"{adapted_path(name.rpartition('.')[0])}.{name.rpartition('.')[2]}": torch.empty_like(value, device="meta")
        for name, value in model.state_dict().items()
        if ".lora_" not in name
    }
    together = revert_weight_conversion(model, dict(hollow)).keys()
    try:
        apart = [each for name, value in hollow.items() for each in revert_weight_conversion(model, {name: value})]
    except Exception:  # whatever a conversion raises that lacks its other half
        return None
    return revert_weight_conversion if set(apart) == set(together) and len(apart) == len(together) else None


def config_of(model: Any, dtype: torch.dtype | None) -> dict[str, Any] | None:
    """The config.json of a model of transformers whose weights are stored in `dtype`; None for another module."""
    to_json = getattr(getattr(model, "config", None), "to_json_string", None)
    if to_json is None:
        return None
    found: dict[str, Any] = json.loads(to_json())
    found["architectures"] = [class_name(model)]
    if dtype is not None:
        found["dtype"] = str(dtype).removeprefix("torch.")
    return found


def class_name(model: object) -> str:
    """The model's class, under the name that it had before FSDP2 made one of its own of it."""
    return type(model).__name__.removeprefix("FSDP")
