"""What can be done with a training checkpoint without the ranks that wrote it: describe, export, merge. One process, a
tensor at a time."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from phalanx.training.checkpoint_folder import (
    CheckpointError,
    RankWriter,
    Saved,
    check_tag,
    make_visible,
    newest_tag,
    partial_folder,
    write_json,
)
from phalanx.training.export import write_model
from phalanx.training.hf_names import stored_tensors

Progress = Callable[[int, int], None]
"""Told bytes done and bytes in all."""


def find(path: Path, tag: str | None = None) -> Path:
    """The checkpoint in `path`: that of `tag`, the newest, or `path` itself. Raises CheckpointError for none."""
    if tag is not None:
        return path / check_tag(tag)
    if (path / "index.json").is_file():
        return path
    newest = newest_tag(path)
    if newest is None:
        raise CheckpointError(f"{path} holds no checkpoint: there is neither an index.json nor a file called latest")
    return path / newest


def describe(saved: Saved) -> dict[str, Any]:
    """What a checkpoint is, as JSON values. Sizes are bytes."""
    index = saved.index
    kinds: dict[str, dict[str, int]] = {}
    for entry in saved.entries:
        found = kinds.setdefault(entry.partition("/")[0], {"tensors": 0, "elements": 0, "bytes": 0})
        found["tensors"] += 1
        found["elements"] += prod(saved.shape(entry))
        found["bytes"] += _bytes(saved, entry)
    config = index["model_config"] or {}
    files = sorted(saved.path.glob("*.safetensors"))
    return {
        "path": str(saved.path),
        "format": index["format"],
        "version": index["version"],
        "model_type": config.get("model_type"),
        "architecture": next(iter(config.get("architectures") or ()), None),
        "global_steps": index["global_steps"],
        "skipped_steps": index["skipped_steps"],
        "tp": index["tp"],
        "dp": index["dp"],
        "stage": index["stage"],
        "optimizer": index["optimizer"],
        "parameters": sum(kinds.get(kind, {}).get("elements", 0) for kind in ("master", "model")),
        "frozen_excluded": bool(index.get("frozen_excluded")),
        "tied": index["tied"],
        "kinds": kinds,
        "files": len(files),
        "bytes": sum(file.stat().st_size for file in files),
        "client_state": index["client_state"],
    }


def weights(saved: Saved) -> dict[str, str]:
    """Name in the module -> entry, of every parameter and persistent buffer."""
    found = {}
    for entry in saved.entries:
        kind, _, name = entry.partition("/")
        if kind in ("master", "model", "buffer"):
            found[name] = entry
    return found


def export(saved: Saved, folder: Path, dtype: torch.dtype | None = None, tell: Progress = lambda *_: None) -> None:
    """Write the model of a checkpoint as a Hugging Face folder.

    Args:
        dtype: of the parameters; default: as they are saved, the master values' float32 in mixed precision.

    Raises CheckpointError for a checkpoint that is not of a whole model of transformers.
    """
    entries = weights(saved)
    model, config = _hollow(saved)
    if adapter := next((name for name in entries if ".lora_" in name or ".modules_to_save." in name), None):
        raise CheckpointError(
            f"{saved.path} is of a model with adapters ({adapter}): load it into an engine, and call "
            "engine.save_pretrained, with merge_adapters=True for the whole model"
        )
    if saved.index.get("frozen_excluded"):
        raise CheckpointError(f"{saved.path} was saved without its frozen parameters: it is not a whole model")
    total = sum(_bytes(saved, entry) for entry in entries.values())
    kinds = {saved.dtype(entry) for entry in entries.values() if not entry.startswith("buffer/")}
    floating = [kind for kind in kinds if kind.is_floating_point]
    written = dtype or (floating[0] if floating else torch.float32)

    def tensors() -> Iterator[tuple[str, Tensor]]:
        done = 0
        for name, entry in entries.items():
            value = saved.read(entry)
            done += value.nbytes
            keeps = entry.startswith("buffer/") or not value.is_floating_point()
            yield name, value if keeps else value.to(written)
            tell(done, total)

    config = {**config, "dtype": str(written).removeprefix("torch.")}
    write_model(folder, stored_tensors(model, tensors()), config, generation=saved.index["generation_config"])


def merge(saved: Saved, folder: Path, tell: Progress = lambda *_: None) -> Path:
    """Write the checkpoint with whole tensors in few files, under its own name into `folder`, where any grid of ranks
    loads it. Returns its path. What was in the folder stays as it was until the new checkpoint is there, and after an
    error."""
    tag = check_tag(saved.tag)
    partial, is_new = partial_folder(folder, tag), not folder.exists()
    # What a run that was killed has left.
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        _write_whole(saved, partial, tell)
        # Within the folder of a run, which checkpoint is the newest does not change.
        make_visible(folder, tag, latest=not (folder / "latest").exists())
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        if is_new and folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()
        raise
    return folder / tag


def _write_whole(saved: Saved, partial: Path, tell: Progress) -> None:
    writer = RankWriter(partial, 0)
    total, done = sum(_bytes(saved, entry) for entry in saved.entries), 0
    for entry in saved.entries:
        value = saved.read(entry)
        writer.add(entry, tuple(value.shape), tuple(slice(0, size) for size in value.shape), value)
        done += value.nbytes
        tell(done, total)
    writer.finish({})
    part = partial / "rank-00000.json"
    write_json(partial / "index.json", {**saved.index, "entries": json.loads(part.read_text())["entries"]})
    part.unlink()


def _hollow(saved: Saved) -> tuple[Any, Mapping[str, Any]]:
    """The model without values, and its config."""
    told = saved.index["model_config"]
    if told is None:
        raise CheckpointError(f"{saved.path} is not of a model of transformers: there is no config to export")
    import transformers

    name = next(iter(told.get("architectures") or ()), "")
    kind = getattr(transformers, name, None)
    if kind is None:
        raise CheckpointError(f"{saved.path} is of a {name or 'nameless model'}, which this transformers does not have")
    config = kind.config_class.from_dict(dict(told))
    with torch.device("meta"):
        return kind(config), json.loads(config.to_json_string()) | {"architectures": [name]}


def _bytes(saved: Saved, entry: str) -> int:
    return prod(saved.shape(entry)) * saved.dtype(entry).itemsize
