"""Serialised inference checkpoints: a built model's parameters as they are served, a file a rank.

``rank_<r>_of_<n>.safetensors`` holds the tensors, ``rank_<r>_of_<n>.json`` what they are, ``phalanx.json`` what model
they belong to. Loading transforms nothing, and refuses a model, TP size, dtype or layout other than was written.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from phalanx.models.container import LayerContainer
from phalanx.models.container_map import ContainerMap
from phalanx.models.hf_config import HFConfig
from phalanx.models.layers import PreparedParameter
from phalanx.models.parameter import InferenceParameter
from phalanx.ops import registry
from phalanx.ops.linear import PreparedWeight
from phalanx.weights import WeightError

if TYPE_CHECKING:
    from phalanx.models.base import TransformerModel

FORMAT = 1
MANIFEST = "phalanx.json"
SAFETENSORS_NAMES = {
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int8: "I8",
    torch.uint8: "U8",
}


def is_serialized(folder: str | Path) -> bool:
    """Whether a folder holds a serialised checkpoint."""
    return (Path(folder) / MANIFEST).is_file()


def save_parameters(folder: str, policy_name: str, model: TransformerModel) -> None:
    """Writes this rank's files, one tensor in flight at a time; rank 0 also writes the manifest, last."""
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    rank, world = model.group.rank, model.group.size
    tensors: dict[str, Tensor] = {}
    entries: dict[str, Any] = {}
    for label, parameter in _parameters(model.layers, model.outer):
        entries[label] = None if parameter is None else _entry(label, parameter, tensors)
    _write_safetensors(target / f"{_stem(rank, world)}.safetensors", tensors)
    _write_json(target / f"{_stem(rank, world)}.json", entries)
    if rank == 0:
        manifest = {
            "format": FORMAT,
            "policy": policy_name,
            "tensor_parallel_size": world,
            "dtype": str(model.dtype).removeprefix("torch."),
            "config": dict(model.config.given),
        }
        _write_json(target / MANIFEST, manifest)


def read_manifest(folder: str | Path) -> dict[str, Any]:
    """What a serialised checkpoint says of itself.

    Raises:
        WeightError: unreadable, or written in another format.
    """
    manifest = _read_json(Path(folder) / MANIFEST)
    if manifest.get("format") != FORMAT:
        raise WeightError(f"{folder} was serialised in format {manifest.get('format')!r}, this is format {FORMAT}")
    return manifest


def restore_parameters(folder: str, policy_name: str, model: TransformerModel, containers: ContainerMap) -> None:
    """Puts this rank's serialised parameters into the containers.

    Raises:
        WeightError: written for another model, policy, TP size, dtype or layout, or incomplete; all reasons listed.
    """
    manifest = read_manifest(folder)
    rank, world = model.group.rank, model.group.size
    problems = _mismatches(manifest, policy_name, model)
    if problems:
        raise WeightError(*[f"{folder}: {problem}" for problem in problems])
    entries = _read_json(Path(folder) / f"{_stem(rank, world)}.json")
    path = Path(folder) / f"{_stem(rank, world)}.safetensors"
    try:
        with safe_open(str(path), framework="pt") as tensors:
            for label, container, name in _slots(containers):
                if label not in entries:
                    raise WeightError(f"{folder}: no parameter {label}: it was serialised from another model")
                container.direct_injection(name, _restore(label, entries.pop(label), tensors, model))
    except (OSError, SafetensorError) as error:
        raise WeightError(f"{path} cannot be read: {error}") from None
    if entries:
        raise WeightError(f"{folder}: parameters that this model lacks: {', '.join(entries)}")


def _mismatches(manifest: Mapping[str, Any], policy_name: str, model: TransformerModel) -> list[str]:
    here = {
        "policy": policy_name,
        "tensor_parallel_size": model.group.size,
        "dtype": str(model.dtype).removeprefix("torch."),
    }
    found = [
        f"serialised with {name}={manifest.get(name)!r}, this engine has {name}={value!r}"
        for name, value in here.items()
        if manifest.get(name) != value
    ]
    stored = HFConfig(manifest["config"])
    differing = [key for key in sorted({*stored, *model.config}) if stored.get(key) != model.config.get(key)]
    if differing:
        found.append(f"serialised from another model: the configs differ in {', '.join(differing)}")
    return found


def _entry(label: str, parameter: InferenceParameter, tensors: dict[str, Tensor]) -> dict[str, Any]:
    tensors[label] = parameter.data
    for name, tensor in parameter.aux.items():
        tensors[f"{label}#{name}"] = tensor
    return {
        "layout": parameter.layout,
        "shape": list(parameter.shape),
        "aux": list(parameter.aux),
        "linear": isinstance(parameter, PreparedParameter),
    }


def _restore(
    label: str, entry: Mapping[str, Any] | None, tensors: Any, model: TransformerModel
) -> InferenceParameter | None:
    if entry is None:
        return None
    data = tensors.get_tensor(label).to(model.device)
    aux = {name: tensors.get_tensor(f"{label}#{name}").to(model.device) for name in entry["aux"]}
    shape = tuple(entry["shape"])
    if not entry["linear"]:
        return InferenceParameter(data, entry["layout"], shape, aux)
    forced = model.placement.forced.get("linear")
    try:
        registry.select("linear", device=model.device, dtype=model.dtype, forced=entry["layout"])
        if forced not in (None, entry["layout"]):
            raise ValueError(f"this engine is told to use {forced!r}")
    except ValueError as error:
        raise WeightError(f"{label} was serialised in the layout {entry['layout']!r}: {error}") from None
    weight = PreparedWeight(data, entry["layout"], shape[0], shape[1], model.dtype, aux)
    return PreparedParameter(data, entry["layout"], shape, aux, weight)


def _slots(containers: ContainerMap) -> Iterator[tuple[str, LayerContainer, str]]:
    for index, container in enumerate(containers.transformer_params):
        for name in container.parameters:
            yield f"layer.{index}.{name}", container, name
    outer = containers.non_transformer_params
    for name in outer.parameters if outer is not None else ():
        yield f"outer.{name}", outer, name  # type: ignore[misc]


def _parameters(layers: list[LayerContainer], outer: LayerContainer) -> Iterator[tuple[str, InferenceParameter | None]]:
    for index, container in enumerate(layers):
        for name, parameter in container.finalized().items():
            yield f"layer.{index}.{name}", parameter
    for name, parameter in outer.finalized().items():
        yield f"outer.{name}", parameter


def _stem(rank: int, world: int) -> str:
    return f"rank_{rank}_of_{world}"


def _write_safetensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """The safetensors format: header length, JSON header, then the bytes; written tensor by tensor, which the library's
    own writer does not do, and renamed into place."""
    header: dict[str, Any] = {}
    offset = 0
    for name, tensor in tensors.items():
        end = offset + tensor.nbytes
        dtype = SAFETENSORS_NAMES[tensor.dtype]
        header[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    aside = path.with_suffix(".tmp")
    with open(aside, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            flat = tensor.detach().cpu().contiguous().view(-1)
            file.write(flat.view(torch.uint8).numpy().data if flat.numel() else b"")
    os.replace(aside, path)


def _write_json(path: Path, value: Any) -> None:
    aside = path.with_suffix(".tmp")
    aside.write_text(json.dumps(value, indent=1))
    os.replace(aside, path)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise WeightError(f"{path} cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise WeightError(f"{path} holds a {type(value).__name__}, expected a JSON object")
    return value
