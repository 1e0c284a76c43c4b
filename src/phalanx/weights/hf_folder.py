"""Writes a model folder as the Hugging Face libraries read it."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from phalanx.weights.source import WeightError

_GIGABYTE = 10**9


def write_hf_folder(
    folder: str | os.PathLike[str],
    tensors: Iterable[tuple[str, torch.Tensor]],
    config: Mapping[str, Any] | None,
    *,
    max_shard_bytes: int = 5 * _GIGABYTE,
    extra_files: Iterable[str | os.PathLike[str]] = (),
    overwrite: bool = False,
    stem: str = "model",
) -> Path:
    """Write config.json (unless it is None), and the tensors as safetensors, with an index where they need more than
    one file; `stem` begins the names of these files.

    `tensors` is streamed: no more than `max_shard_bytes` (or one larger tensor) are held at a time. `extra_files`, a
    tokenizer's for example, are copied along. All is written aside and then renamed, so that the folder is there whole
    or not at all. Raises FileExistsError for a folder with content unless `overwrite`, which replaces it, and
    WeightError for a name that comes twice.
    """
    target = Path(folder).absolute()
    if target.exists() and not overwrite and any(target.iterdir()):
        raise FileExistsError(f"{target} is not empty: choose another folder, or pass overwrite=True")
    target.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        content = aside / "new"
        content.mkdir()
        if config is not None:
            (content / "config.json").write_text(json.dumps(dict(config), indent=2, sort_keys=True) + "\n")
        _write_shards(content, tensors, max_shard_bytes, stem)
        for file in extra_files:
            shutil.copy(file, content)
        _exchange(content, target, aside / "old")
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return target


def _exchange(content: Path, target: Path, old: Path) -> None:
    replaces = target.exists()
    if replaces:
        target.rename(old)
    try:
        content.rename(target)
    except OSError:
        if replaces:
            old.rename(target)
        raise


def _write_shards(folder: Path, tensors: Iterable[tuple[str, torch.Tensor]], max_shard_bytes: int, stem: str) -> None:
    shards: list[list[str]] = []
    names: set[str] = set()
    total = 0
    held: dict[str, torch.Tensor] = {}
    held_bytes = 0

    def flush() -> None:
        nonlocal held_bytes
        save_file(held, folder / _temporary_name(len(shards)), metadata={"format": "pt"})
        shards.append(list(held))
        held.clear()
        held_bytes = 0

    for name, value in tensors:
        if name in names:
            raise WeightError(f"the tensors to write give {name!r} twice")
        names.add(name)
        if held and held_bytes + value.nbytes > max_shard_bytes:
            flush()
        held[name] = _own_tensor(value)
        held_bytes += value.nbytes
        total += value.nbytes
    if held or not shards:
        flush()
    _name_shards(folder, shards, total, stem)


def _name_shards(folder: Path, shards: list[list[str]], total: int, stem: str) -> None:
    """Give the files their final names, which say how many there are, and write the index."""
    if len(shards) == 1:
        (folder / _temporary_name(0)).rename(folder / f"{stem}.safetensors")
        return
    weight_map = {}
    for number, names in enumerate(shards):
        file = f"{stem}-{number + 1:05}-of-{len(shards):05}.safetensors"
        (folder / _temporary_name(number)).rename(folder / file)
        weight_map.update(dict.fromkeys(names, file))
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / f"{stem}.safetensors.index.json").write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def _temporary_name(number: int) -> str:
    return f"shard-{number}"


def _own_tensor(value: torch.Tensor) -> torch.Tensor:
    """On the CPU, contiguous, and with no memory shared with another one (safetensors refuses that)."""
    return value.detach().to("cpu", copy=True).contiguous()
