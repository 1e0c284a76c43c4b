"""A trained adapter of PEFT leaves as stock PEFT files, or merged into the model that it adapts."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from phalanx.parallel.adapters import adapted_path
from phalanx.training.export import move_into, parent_of, save_model
from phalanx.training.together import Together, place_among_all
from phalanx.training.whole import tied_names, whole_tensors

if TYPE_CHECKING:
    from phalanx.training.engine import TrainingEngine


def is_adapted(module: Any) -> bool:
    """Whether it is a model that PEFT has wrapped."""
    return hasattr(module, "peft_config") and hasattr(module, "get_base_model")


def save_adapter(engine: TrainingEngine, folder: Path, tokenizer: Any) -> None:
    """adapter_model.safetensors and adapter_config.json, by PEFT's own code, of whole tensors."""
    module: Any = engine.module
    with Together(engine.mesh, f"saving {folder}"):
        state = adapter_state(engine)
        if place_among_all(engine.mesh)[0] == 0:
            with tempfile.TemporaryDirectory(dir=parent_of(folder), prefix=f".{folder.name}.") as aside:
                new = Path(aside, "new")
                # The instance's own method refuses: it would see shards. The embedding itself is never an adapter's.
                type(module).save_pretrained(module, new, state_dict=state, save_embedding_layers=False)
                if tokenizer is not None:
                    tokenizer.save_pretrained(new)
                move_into(new, folder, "adapter_model")


def adapter_state(engine: TrainingEngine) -> dict[str, Tensor]:
    """What the adapters of the module have added to it, whole, on rank 0; empty on the others. Called by all ranks."""
    module: Any = engine.module
    mark = re.compile(rf"\.({re.escape(module.base_model.prefix)}\w*|modules_to_save|trainable_tokens\w*)\.")
    names = [name for name in module.state_dict() if mark.search(name)]
    return {name: value for name, value in whole_tensors(engine, only=names) if value is not None}


def save_merged(engine: TrainingEngine, folder: Path, tokenizer: Any, max_shard_size: int | str) -> None:
    """The model with its active LoRA adapters added to its weights, as a Hugging Face folder; a tensor at a time."""
    module: Any = engine.module
    _check_mergeable(module)
    with Together(engine.mesh, f"merging the adapters for {folder}"):
        state = adapter_state(engine)

    def merged(tensors: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, value in tensors:
            if name in state:
                continue
            copy = _trained_copy(name, module, state)
            change = _change(name, module, state, value) if copy is None else None
            if change is not None:
                value = value + change
            yield plain_name(name, module), value if copy is None else copy

    save_model(engine, module.get_base_model(), folder, tokenizer, max_shard_size, merged)


def plain_name(name: str, module: Any) -> str:
    """A name of an adapted model's state as the model alone has it."""
    base = module.get_base_model()
    prefix = next(path for path, each in module.named_modules() if each is base)
    path, _, leaf = name.removeprefix(f"{prefix}.").rpartition(".")
    return f"{adapted_path(path)}.{leaf}"


def _trained_copy(name: str, module: Any, state: Mapping[str, Tensor]) -> Tensor | None:
    """What was trained in the place of an original, of which `name` is a tensor."""
    path, found, leaf = name.partition(".original_module.")
    if not found:
        return None
    wrapper = module.get_submodule(path)
    return next((state[f"{path}.modules_to_save.{active}.{leaf}"] for active in wrapper.active_adapters), None)


def _change(name: str, module: Any, state: Mapping[str, Tensor], value: Tensor) -> Tensor | None:
    """What the active adapters add to the tensor `name`."""
    path, inside, leaf = name.rpartition(".base_layer.")
    if not inside:
        return None
    layer = module.get_submodule(path)
    changes: list[Tensor] = []
    for adapter in layer.active_adapters:
        if adapter not in layer.scaling:
            continue
        scale = layer.scaling[adapter]
        embedding_a, embedding_b = (state.get(f"{path}.lora_embedding_{factor}.{adapter}") for factor in "AB")
        if leaf == "bias":
            if (bias := state.get(f"{path}.lora_B.{adapter}.bias")) is not None:
                changes.append(bias * scale)
        elif embedding_a is not None and embedding_b is not None:
            changes.append((embedding_b.float() @ embedding_a.float()).T * scale)
        else:
            factors = (state[f"{path}.lora_{factor}.{adapter}.weight"].float() for factor in "BA")
            product = torch.matmul(*factors) * scale
            changes.append(product.T if layer.fan_in_fan_out else product)
    return sum(changes, torch.zeros((), dtype=value.dtype)).to(value.dtype) if changes else None


def _check_mergeable(module: Any) -> None:
    tied = tied_names(module)
    for path, layer in module.named_modules():
        ends = {f"{path}.base_layer.weight", f"{path}.original_module.weight"}
        if ends & {*tied, *tied.values()}:
            raise ValueError(
                f"{path} is trained by an adapter and tied to another layer: merged, they would be two. Untie them "
                "before training (tie_word_embeddings=False), or save the adapter alone"
            )
        if not isinstance(getattr(layer, "base_layer", None), nn.Module):
            continue
        if getattr(layer, "lora_variant", None) or not hasattr(layer, "scaling") or hasattr(layer, "parameter_name"):
            raise ValueError(
                f"{path} ({type(layer).__name__}) is no plain LoRA layer: save the adapter, and merge it with PEFT"
            )
        if any(layer.lora_bias.values()) and getattr(layer.base_layer, "bias", None) is None:
            raise ValueError(f"{path} has a lora_bias and no bias of its own to add it to: it cannot be merged")
