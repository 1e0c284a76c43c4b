"""A trained model as a Hugging Face folder: whole tensors under their published names, one at a time through rank 0.

Nobody ever holds the model: the ranks put one tensor together at a time, and rank 0 writes it.
"""

from __future__ import annotations

import json
import logging
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from phalanx.training.hf_names import config_of, stored_tensors
from phalanx.training.precision import Precision
from phalanx.training.together import Together, place_among_all
from phalanx.training.whole import tied_names, whole_tensors
from phalanx.weights.hf_folder import write_hf_folder

if TYPE_CHECKING:
    from phalanx.training.engine import TrainingEngine

_log = logging.getLogger(__name__)

SHARD_BYTES = 5 * 10**9
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def save_weights(engine: TrainingEngine, folder: Path, filename: str, *, exclude_frozen: bool) -> None:
    """See `TrainingEngine.save_16bit_model`."""
    stem = _stem(filename)

    def write(tensors: Iterator[tuple[str, Tensor]]) -> None:
        with tempfile.TemporaryDirectory(dir=parent_of(folder), prefix=f".{folder.name}.") as aside:
            write_hf_folder(Path(aside, "new"), stored_tensors(engine.module, tensors), None, stem=stem)
            move_into(Path(aside, "new"), folder, stem)

    _stream(engine, f"saving {folder}", write, exclude_frozen=exclude_frozen)


def save_model(
    engine: TrainingEngine,
    model: Any,
    folder: Path,
    tokenizer: Any,
    max_shard_size: int | str,
    change: Callable[[Iterator[tuple[str, Tensor]]], Iterator[tuple[str, Tensor]]] = iter,
) -> None:
    """Write `model`, the engine's module or one within it; its tensors are what `change` makes of the module's."""
    limit = shard_bytes(max_shard_size)
    given = next((p.dtype for p in model.parameters() if p.is_floating_point()), None)
    config = config_of(model, None if given is None else Precision.of(engine.config).param_dtype(given))
    if config is None:
        raise ValueError(
            f"save_pretrained needs a model of transformers, and {type(model).__name__} has no config of one: "
            "save_16bit_model writes the weights alone"
        )

    def write(tensors: Iterator[tuple[str, Tensor]]) -> None:
        write_model(
            folder,
            stored_tensors(model, change(tensors)),
            config,
            generation=generation_of(model),
            tokenizer=tokenizer,
            max_shard_bytes=limit,
        )

    _stream(engine, f"saving {folder}", write)


def consolidated(engine: TrainingEngine, *, exclude_frozen: bool) -> dict[str, Tensor] | None:
    """See `TrainingEngine._consolidated_16bit_state_dict`."""
    found = {name: value for name, value in whole_tensors(engine, exclude_frozen=exclude_frozen) if value is not None}
    if place_among_all(engine.mesh)[0]:
        return None
    # Under its further names as well, without more memory: what strips a module's state dict expects all of them.
    return found | {name: found[first] for name, first in tied_names(engine.module).items() if first in found}


def write_model(
    folder: Path,
    tensors: Iterable[tuple[str, Tensor]],
    config: Mapping[str, Any],
    *,
    generation: Mapping[str, Any] | None = None,
    tokenizer: Any = None,
    max_shard_bytes: int = SHARD_BYTES,
) -> None:
    """A whole Hugging Face folder. It is written aside; what is in `folder` besides a model stays."""
    with tempfile.TemporaryDirectory(dir=parent_of(folder), prefix=f".{folder.name}.") as aside:
        new, more = Path(aside, "new"), Path(aside, "more")
        more.mkdir()
        if generation is not None:
            (more / "generation_config.json").write_text(json.dumps(dict(generation), indent=2, sort_keys=True) + "\n")
        if tokenizer is not None:
            tokenizer.save_pretrained(more)
        write_hf_folder(new, tensors, config, max_shard_bytes=max_shard_bytes)
        shutil.copytree(more, new, dirs_exist_ok=True)
        move_into(new, folder, "model")


def move_into(new: Path, folder: Path, stem: str) -> None:
    """Puts a folder where it belongs: as a whole if nothing is there, else file by file, weights before their index.

    Weight files of an earlier model that would be read beside the new ones are removed.
    """
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()
    if not folder.exists():
        new.rename(folder)
        return
    written = {path.name for path in new.iterdir()}
    for path in sorted(new.iterdir(), key=lambda path: (path.suffix == ".json", path.name)):
        if path.is_dir():
            shutil.copytree(path, folder / path.name, dirs_exist_ok=True)
        else:
            path.replace(folder / path.name)
    pattern = re.compile(rf"{re.escape(stem)}(-\d{{5}}-of-\d{{5}})?\.safetensors(\.index\.json)?")
    for path in folder.iterdir():
        if pattern.fullmatch(path.name) and path.name not in written:
            path.unlink()


def generation_of(module: Any) -> dict[str, Any] | None:
    """The generation config of a model of transformers, as JSON values; None for another module."""
    to_json = getattr(getattr(module, "generation_config", None), "to_json_string", None)
    return None if to_json is None else json.loads(to_json())


def shard_bytes(size: int | str) -> int:
    """Bytes from a number or a text such as "5GB" or "200MiB". Raises ValueError for anything else."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]I?B)?", str(size).strip().upper())
    if match is None or float(match[1]) <= 0:
        raise ValueError(f'max_shard_size is a number of bytes or a text such as "5GB", given {size!r}')
    return int(float(match[1]) * _UNITS[match[2] or ""])


def _stream(engine: TrainingEngine, what: str, write: Any, *, exclude_frozen: bool = False) -> None:
    """Rank 0 gives `write` all whole tensors, one after the other; the other ranks do their part of each."""
    with Together(engine.mesh, what):
        tensors = whole_tensors(engine, exclude_frozen=exclude_frozen)
        try:
            if place_among_all(engine.mesh)[0] == 0:
                write((name, value) for name, value in tensors if value is not None)
        finally:
            # After an error as well: the other ranks are on their way through the tensors.
            for _ in tensors:
                pass


def _stem(filename: str) -> str:
    path = Path(filename)
    if not filename or path.name != filename:
        raise ValueError(f"save_filename is the name of a file within save_dir, given {filename!r}")
    stem = path.stem if path.suffix in (".bin", ".pt", ".pth", ".safetensors") else filename
    stem = "model" if stem == "pytorch_model" else stem
    if path.suffix != ".safetensors":
        _log.info("%s: the weights are written as safetensors, to %s.safetensors", filename, stem)
    return stem


def parent_of(folder: Path) -> Path:
    """Where a folder is made: its parent, which is there afterwards."""
    parent = folder.absolute().parent
    parent.mkdir(parents=True, exist_ok=True)
    return parent
