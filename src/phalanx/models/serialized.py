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
from torch import Tensor

from phalanx.models.container import LayerContainer
from phalanx.models.container_map import ContainerMap
from phalanx.models.experts import ExpertsParameter, restored_experts
from phalanx.models.hf_config import HFConfig
from phalanx.models.layers import PreparedParameter
from phalanx.models.parameter import InferenceParameter
from phalanx.ops.linear import PreparedWeight, reader_of
from phalanx.ops.moe import check_saved
from phalanx.ops.quantized import LAYOUTS as QUANTIZED_LAYOUTS
from phalanx.weights import WeightError
from phalanx.weights.safetensors_source import DTYPES, SafetensorsSource

if TYPE_CHECKING:
    from phalanx.models.base import TransformerModel

FORMAT = 2
MANIFEST = "phalanx.json"
MANIFEST_KEYS = ("format", "policy", "tensor_parallel_size", "dtype", "config")
ENTRY_KEYS = ("layout", "shape", "aux", "op")
OPS = (None, "linear", "moe")


def is_serialized(folder: str | Path) -> bool:
    """Whether a folder holds a serialised checkpoint."""
    return (Path(folder) / MANIFEST).is_file()


def save_parameters(folder: str, policy_name: str, model: TransformerModel) -> None:
    """Writes this rank's files, one tensor in flight at a time; every rank calls it.

    The manifest is there only while all files belong together: rank 0 removes it first and writes it last, so that a
    folder which was written over in part is no checkpoint.
    """
    if not model.layers and model.outer is None:
        raise WeightError(
            "a model without a family of its own (the generic path) cannot be serialised: serve its folder as it is"
        )
    target = Path(folder)
    group = model.group
    stem = target / f"rank_{group.rank}_of_{group.size}"
    target.mkdir(parents=True, exist_ok=True)
    if group.rank == 0:
        (target / MANIFEST).unlink(missing_ok=True)
    group.barrier()
    tensors: dict[str, Tensor] = {}
    entries: dict[str, Any] = {}
    for label, parameter in _parameters(model.layers, model.outer):
        entries[label] = None if parameter is None else _entry(label, parameter, tensors)
    _write_safetensors(stem.with_suffix(".safetensors"), tensors)
    _write_json(stem.with_suffix(".json"), entries)
    group.barrier()
    if group.rank == 0:
        manifest = {
            "format": FORMAT,
            "policy": policy_name,
            "tensor_parallel_size": group.size,
            "dtype": _name(model.dtype),
            "quantization": _quantization(model),
            "config": dict(model.config.given),
        }
        _write_json(target / MANIFEST, manifest)


def read_manifest(folder: str | Path) -> dict[str, Any]:
    """What a serialised checkpoint says of itself.

    Raises:
        WeightError: unreadable, or written in another format.
    """
    path = Path(folder) / MANIFEST
    manifest = _read_json(path)
    if manifest.get("format") != FORMAT:
        raise WeightError(f"{folder} was serialised in format {manifest.get('format')!r}, this is format {FORMAT}")
    absent = [key for key in MANIFEST_KEYS if key not in manifest]
    if absent or not isinstance(manifest["config"], dict):
        raise WeightError(f"{path} is corrupt: it does not say {', '.join(absent) or 'a config'}")
    return manifest


def restore_parameters(folder: str, policy_name: str, model: TransformerModel, containers: ContainerMap) -> None:
    """Puts this rank's serialised parameters into the containers.

    Raises:
        WeightError: written for another model, policy, TP size, dtype or layout, or incomplete; all reasons are listed,
            before anything is read.
    """
    stem = f"rank_{model.group.rank}_of_{model.group.size}"
    problems = _mismatches(read_manifest(folder), policy_name, model)
    if problems:
        raise WeightError(*[f"{folder}: {problem}" for problem in problems])
    entries = _read_json(Path(folder) / f"{stem}.json")
    source = SafetensorsSource(Path(folder), [f"{stem}.safetensors"])
    slots = dict(_slots(containers))
    problems = source.verify()
    problems += [f"{folder}: {stem}.json lacks the parameter {label}" for label in slots if label not in entries]
    problems += [
        f"{folder}: {stem}.json has {label}, which this model lacks" for label in entries if label not in slots
    ]
    if not problems:
        for label, entry in entries.items():
            problems += [f"{folder}: {label}: {problem}" for problem in _entry_problems(label, entry, source, model)]
    if problems:
        raise WeightError(*problems)
    for label, (container, name) in slots.items():
        entry = entries[label]
        container.direct_injection(name, None if entry is None else _restore(label, entry, source, model))


def _mismatches(manifest: Mapping[str, Any], policy_name: str, model: TransformerModel) -> list[str]:
    here = {"policy": policy_name, "tensor_parallel_size": model.group.size, "dtype": _name(model.dtype)}
    found = [
        f"serialised with {name}={manifest[name]!r}, this engine has {name}={value!r}"
        for name, value in here.items()
        if manifest[name] != value
    ]
    wanted, written = model.placement.quantization, manifest.get("quantization")
    if wanted not in (None, written):
        found.append(
            f"serialised with quantization={written!r}, this engine has quantization={wanted!r}: leave it out to serve "
            "the weights as they were written"
        )
    stored = HFConfig(manifest["config"])
    differing = [key for key in sorted({*stored, *model.config}) if stored.get(key) != model.config.get(key)]
    if differing:
        found.append(f"serialised from another model: the configs differ in {', '.join(differing)}")
    return found


def _quantization(model: TransformerModel) -> str | None:
    """The layout of the projections: the engine's own choice, or that of the checkpoint which it serves as written."""
    kinds = {p.layout for _, p in _parameters(model.layers, None) if isinstance(p, PreparedParameter)}
    found = sorted(kinds & set(QUANTIZED_LAYOUTS))
    return found[0] if found else None


def _entry(label: str, parameter: InferenceParameter, tensors: dict[str, Tensor]) -> dict[str, Any]:
    tensors[label] = parameter.data
    for name, tensor in parameter.aux.items():
        tensors[_aux(label, name)] = tensor
    return {
        "layout": parameter.layout,
        "shape": list(parameter.shape),
        "aux": list(parameter.aux),
        "op": _op(parameter),
    }


def _op(parameter: InferenceParameter) -> str | None:
    """The op whose layout a parameter is in; None for one that is as it was cut."""
    if isinstance(parameter, ExpertsParameter):
        return "moe"
    return "linear" if isinstance(parameter, PreparedParameter) else None


def _entry_problems(label: str, entry: Any, source: SafetensorsSource, model: TransformerModel) -> list[str]:
    """Why a serialised parameter cannot be served here."""
    if entry is None:
        return []
    if not isinstance(entry, dict) or any(key not in entry for key in ENTRY_KEYS) or entry["op"] not in OPS:
        return [f"its entry is corrupt: {entry!r}"]
    absent = {label, *(_aux(label, name) for name in entry["aux"])} - set(source.names())
    problems = [f"the tensor {name} is absent" for name in sorted(absent)]
    if entry["op"] is None:
        shape = tuple(source.info(label).shape) if label not in absent else None
        if shape not in (None, tuple(entry["shape"])):
            problems.append(f"its tensor is {shape}, its entry says {tuple(entry['shape'])}")
        return problems
    layout, forced = entry["layout"], model.placement.forced
    try:
        if entry["op"] == "moe":
            check_saved(layout, entry["shape"], entry["aux"], model.device, model.dtype, forced)
            return problems
        reader_of(layout, model.device, model.dtype)
    except ValueError as error:
        problems.append(f"serialised in the layout {layout!r}: {error}")
    if not _reads(forced.get("linear"), layout, model):
        problems.append(f"serialised in the layout {layout!r}, this engine is told to use {forced['linear']!r}")
    return problems


def _reads(forced: str | None, layout: str, model: TransformerModel) -> bool:
    """Whether the linear back end that the user forced, if any, multiplies with weights in a layout."""
    if forced is None:
        return True
    try:
        reader_of(layout, model.device, model.dtype, forced)
    except ValueError:
        return False
    return True


def _restore(
    label: str, entry: Mapping[str, Any], source: SafetensorsSource, model: TransformerModel
) -> InferenceParameter:
    data = source.read(label).to(model.device)
    aux = {name: source.read(_aux(label, name)).to(model.device) for name in entry["aux"]}
    layout, shape = entry["layout"], tuple(entry["shape"])
    if entry["op"] is None:
        return InferenceParameter(data, layout, shape, aux)
    if entry["op"] == "moe":
        return restored_experts(data, layout, shape, model.dtype, aux)
    forced = model.placement.forced.get("linear")
    weight = PreparedWeight(data, layout, shape[0], shape[1], model.dtype, aux, forced)
    return PreparedParameter(data, layout, shape, aux, weight)


def _slots(containers: ContainerMap) -> Iterator[tuple[str, tuple[LayerContainer, str]]]:
    for prefix, container in _labelled(containers.transformer_params, containers.non_transformer_params):
        for name in container.parameters:
            yield f"{prefix}.{name}", (container, name)


def _parameters(
    layers: list[LayerContainer], outer: LayerContainer | None
) -> Iterator[tuple[str, InferenceParameter | None]]:
    for prefix, container in _labelled(layers, outer):
        for name, parameter in container.finalized().items():
            yield f"{prefix}.{name}", parameter


def _labelled(layers: list[LayerContainer], outer: LayerContainer | None) -> Iterator[tuple[str, LayerContainer]]:
    for index, container in enumerate(layers):
        yield f"layer.{index}", container
    if outer is not None:
        yield "outer", outer


def _aux(label: str, name: str) -> str:
    return f"{label}#{name}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _write_safetensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """The safetensors format: header length, JSON header, then the bytes; written tensor by tensor, which the library's
    own writer does not do, and renamed into place."""
    names = {dtype: name for name, dtype in DTYPES.items()}
    header: dict[str, Any] = {}
    offset = 0
    for name, tensor in tensors.items():
        end = offset + tensor.nbytes
        header[name] = {"dtype": names[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, end]}
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
    aside = path.with_suffix(".json.tmp")
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
