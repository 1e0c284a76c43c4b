"""The folder of a training checkpoint: safetensors files of boxes, and an index that says which box lies where.

    checkpoints/latest                    the tag of the newest complete checkpoint
    checkpoints/global_step8/index.json   what is saved, and every box: file, key, place in the whole tensor
    checkpoints/global_step8/rank-00000-00000.safetensors ...

Every rank writes what it owns into a hidden folder; when all have, rank 0 writes the index and renames the folder, so
that a checkpoint is there whole or not at all. Any number of ranks reads it: each the boxes that meet its own. There is
no pickle in it.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from math import prod
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, NonNegativeInt, model_validator
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from phalanx.config import ConfigError
from phalanx.layout.boxes import Box, meeting, relative, sizes

FORMAT = "phalanx training checkpoint"
VERSION = 1
# A file is written as soon as it holds this much, so that a rank never has a second copy of all that it owns.
FILE_BYTES = 1 << 30
_POLL_SECONDS = 0.02
_SAID = {
    *("tp", "dp", "stage", "ranks", "entries", "model_config", "generation_config", "tied", "optimizer"),
    *("rules", "param_groups", "lr_scheduler", "loss_scaler", "global_steps", "skipped_steps", "client_state"),
}
"""What every index says."""


class CheckpointError(ValueError):
    """A checkpoint that cannot be written or read; the message says which and why."""


def partial_folder(folder: Path, tag: str) -> Path:
    """Where a checkpoint is while it is written."""
    return folder / f".{tag}.partial"


def check_tag(tag: str) -> str:
    """The tag, if it can be the name of a folder that is seen. Raises CheckpointError."""
    # Hidden names are those of checkpoints that are being written.
    fits = tag.isprintable() and tag == tag.strip() and not tag.startswith(".") and len(tag.encode()) <= 200
    if not tag or not fits or "/" in tag or "\\" in tag or tag == "latest":
        raise CheckpointError(
            f"a checkpoint's tag is the name of a folder: at most 200 bytes, printable, without slashes, not hidden, "
            f"without spaces at its ends, not 'latest'; given {tag!r:.220}"
        )
    return tag


class RankWriter:
    """Writes the boxes of one rank.

    Args:
        folder: the partial folder; it is there.
        rank: of all ranks.
        keep: hold everything in the host's memory until `finish` (the caller goes on and changes the tensors).
    """

    def __init__(self, folder: Path, rank: int, *, keep: bool = False) -> None:
        self.folder = folder
        self.rank = rank
        self.keep = keep
        self._entries: dict[str, dict[str, Any]] = {}
        self._files: list[dict[str, Tensor]] = [{}]
        self._bytes = 0
        self._written = 0

    def add(self, entry: str, shape: tuple[int, ...], box: Box, values: Tensor) -> None:
        """The values of a box of the tensor `entry`, whose whole shape is `shape`."""
        copy = values.detach().to("cpu", copy=self.keep).contiguous()
        if self._bytes and self._bytes + copy.nbytes > FILE_BYTES:
            self._next_file()
        key = str(len(self._files[-1]))
        self._files[-1][key] = copy
        self._bytes += copy.nbytes
        told = self._entries.setdefault(entry, {"shape": list(shape), "dtype": _name(copy.dtype), "boxes": []})
        starts = [side.start for side in box]
        told["boxes"].append([self._file_name(self._written + len(self._files) - 1), key, starts, list(sizes(box))])

    def finish(self, extra: Mapping[str, Any]) -> None:
        """Writes what is left, and then this rank's part of the index, `extra` with it."""
        while self._files:
            self._write(self._files.pop(0))
        write_json(self.folder / f"rank-{self.rank:05d}.json", {"entries": self._entries, **extra})

    def fail(self, reason: str) -> None:
        """Tells the rank that waits for all that this one has failed.

        What it has written goes first: a full disk has no room for the note.
        """
        for path in self.folder.glob(f"rank-{self.rank:05d}-*.safetensors"):
            path.unlink(missing_ok=True)
        write_json(self.folder / f"rank-{self.rank:05d}.failed", {"reason": reason})

    def _next_file(self) -> None:
        if not self.keep:
            self._write(self._files.pop(0))
        self._files.append({})
        self._bytes = 0

    def _write(self, tensors: dict[str, Tensor]) -> None:
        if tensors:
            path = self.folder / self._file_name(self._written)
            save_file(tensors, path)
            _sync(path)
        self._written += 1

    def _file_name(self, number: int) -> str:
        return f"rank-{self.rank:05d}-{number:05d}.safetensors"


def commit(folder: Path, tag: str, world: int, about: Mapping[str, Any], *, latest: bool, patience: float) -> None:
    """On rank 0: waits until all ranks have written, joins their indexes, and makes the checkpoint visible.

    Args:
        about: what else the index says.
        latest: whether `latest` names this one from now on.
        patience: seconds to wait for the other ranks.

    Raises:
        CheckpointError: a rank has failed, or has not written in time; nothing is visible then.
    """
    partial = partial_folder(folder, tag)
    entries: dict[str, dict[str, Any]] = {}
    ranks = []
    for part in _all_written(partial, world, patience):
        for entry, told in part.pop("entries").items():
            known = entries.setdefault(entry, {**told, "boxes": []})
            if (known["shape"], known["dtype"]) != (told["shape"], told["dtype"]):
                raise CheckpointError(f"{entry}: ranks hold it as {known['dtype']} {known['shape']} and {told}")
            known["boxes"] += told["boxes"]
        ranks.append(part)
    write_json(
        partial / "index.json",
        {"format": FORMAT, "version": VERSION, **about, "ranks": ranks, "entries": entries},
    )
    for rank in range(world):
        (partial / f"rank-{rank:05d}.json").unlink()
    make_visible(folder, tag, latest=latest)


def make_visible(folder: Path, tag: str, *, latest: bool) -> None:
    """The partial folder of a checkpoint that is complete gets its name; one of the same name goes."""
    target, old = folder / tag, folder / f".{tag}.old"
    if target.exists():
        # After a crash between these renames the old one is all there is: then it stays until the new one is there.
        shutil.rmtree(old, ignore_errors=True)
        target.rename(old)
    partial_folder(folder, tag).rename(target)
    _sync(folder)
    shutil.rmtree(old, ignore_errors=True)
    if latest:
        write_text(folder / "latest", tag)


def _all_written(partial: Path, world: int, patience: float) -> Iterator[dict[str, Any]]:
    deadline = time.monotonic() + patience
    for rank in range(world):
        path, failed = partial / f"rank-{rank:05d}.json", partial / f"rank-{rank:05d}.failed"
        while not path.exists():
            if failed.exists():
                raise CheckpointError(f"rank {rank} could not write: {json.loads(failed.read_text())['reason']}")
            if time.monotonic() > deadline:
                raise CheckpointError(
                    f"rank {rank} has not written to {partial} within {patience:.0f} s: all ranks must see one folder"
                )
            time.sleep(_POLL_SECONDS)
        yield json.loads(path.read_text())


def newest_tag(folder: Path) -> str | None:
    """The tag that `latest` names; None where there is no checkpoint."""
    latest = folder / "latest"
    if not latest.is_file():
        return None
    try:
        return check_tag(latest.read_text(encoding="utf-8").strip())
    except ValueError as error:
        raise CheckpointError(f"{latest} does not name a checkpoint: {error}") from None


def check_new_run(folder: Path) -> None:
    """Raises ConfigError where a run has left its checkpoints already: a new one would write over them."""
    if newest_tag(folder) is not None:
        raise ConfigError(f"{folder} holds a run already: go on with --resume, or choose another output.folder")


class _Entry(BaseModel):
    """One tensor in an index: of each box the file, the key in it, where it begins and how large it is."""

    shape: list[NonNegativeInt]
    dtype: str
    boxes: list[tuple[str, str, list[NonNegativeInt], list[NonNegativeInt]]]

    @model_validator(mode="after")
    def _one_number_a_dimension(self) -> _Entry:
        if any(
            len(starts) != len(self.shape) or len(lengths) != len(self.shape) for _, _, starts, lengths in self.boxes
        ):
            raise ValueError(f"boxes do not have the {len(self.shape)} dimensions of the tensor")
        return self


class Saved:
    """A checkpoint that is read. Close it, or use it in a `with`.

    Raises:
        CheckpointError: no checkpoint, or one that is broken or of another format.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tag = path.name
        # A crash between the two renames of `commit` leaves the older checkpoint of this tag under a hidden name.
        old = path.parent / f".{path.name}.old"
        if not path.is_dir() and old.is_dir():
            path = self.path = old
        try:
            self.index: dict[str, Any] = json.loads((path / "index.json").read_text())
        except FileNotFoundError:
            raise CheckpointError(f"{path} holds no checkpoint: there is no index.json") from None
        except ValueError as error:
            raise CheckpointError(f"{path / 'index.json'} is broken: {error}") from None
        if not isinstance(self.index, dict):
            raise CheckpointError(f"{path / 'index.json'} is broken: it holds no object")
        if self.index.get("format") != FORMAT or self.index.get("version") != VERSION:
            raise CheckpointError(
                f"{path} is a {self.index.get('format')!r} of version {self.index.get('version')}; expected "
                f"{FORMAT!r} of version {VERSION}"
            )
        if lacking := sorted(_SAID - self.index.keys()):
            raise CheckpointError(f"{path / 'index.json'} is broken: it lacks {', '.join(lacking)}")
        try:
            self.entries = {
                name: _Entry.model_validate(told).model_dump() for name, told in self.index["entries"].items()
            }
        except (ValueError, AttributeError, KeyError, TypeError) as error:
            raise CheckpointError(f"{path / 'index.json'} is broken: {error}") from None
        self._open = ExitStack()
        self._files: dict[str, Any] = {}

    def shape(self, entry: str) -> tuple[int, ...]:
        """The whole shape of a tensor."""
        return tuple(self.entries[entry]["shape"])

    def dtype(self, entry: str) -> torch.dtype:
        """The dtype of a tensor."""
        found = getattr(torch, self.entries[entry]["dtype"], None)
        if not isinstance(found, torch.dtype):
            raise CheckpointError(f"{self.path}: {entry} has the unknown dtype {self.entries[entry]['dtype']!r}")
        return found

    def read_into(self, out: Tensor, entry: str, box: Box) -> None:
        """The values of a box into `out`, which has its shape.

        Raises:
            CheckpointError: the boxes in the files do not cover it.
        """
        told = self.entries[entry]
        boxes = [_box(starts, lengths) for _, _, starts, lengths in told["boxes"]]
        once = sum(prod(sizes(b)) for b in boxes) == prod(told["shape"])
        seen = None if once else torch.zeros(out.shape, dtype=torch.bool)
        count = 0
        for there, (file, key, _, _) in zip(boxes, told["boxes"], strict=True):
            met = meeting(there, box)
            if met is None:
                continue
            part = self._slice(file, key, relative(met, there))
            place = relative(met, box)
            out[place].copy_(part)
            count += part.numel()
            if seen is not None:
                seen[place] = True
        if count < out.numel() or (seen is not None and not bool(seen.all())):
            raise CheckpointError(f"{self.path}: {entry} is not there whole: {list(map(str, box))} is not covered")

    def read(self, entry: str, box: Box | None = None) -> Tensor:
        """A box of a tensor, or all of it."""
        box = tuple(slice(0, size) for size in self.shape(entry)) if box is None else box
        out = torch.empty(sizes(box), dtype=self.dtype(entry))
        self.read_into(out, entry, box)
        return out

    def close(self) -> None:
        """Closes the files."""
        self._files.clear()
        self._open.close()

    def __enter__(self) -> Saved:
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()

    def _slice(self, file: str, key: str, box: Box) -> Tensor:
        try:
            if file not in self._files:
                if Path(file).name != file:
                    raise CheckpointError(f"{self.path}: the index names the file {file!r} outside of the checkpoint")
                self._files[file] = self._open.enter_context(safe_open(self.path / file, framework="pt"))
            opened = self._files[file]
            part: Tensor = opened.get_slice(key)[box] if box else opened.get_tensor(key)
            if tuple(part.shape) != sizes(box):
                raise CheckpointError(f"{self.path / file} has {list(part.shape)} where the index says {sizes(box)}")
            return part
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{self.path / file} cannot be read: {error}") from None


def write_json(path: Path, value: Any) -> None:
    """Written aside and renamed. Raises CheckpointError for what JSON does not know."""
    try:
        text = json.dumps(value)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{path.name}: this cannot be saved as JSON: {error}") from None
    write_text(path, text)


def write_text(path: Path, text: str) -> None:
    """Written aside and renamed."""
    aside = path.with_name(f".{path.name}.new")
    aside.write_text(text)
    _sync(aside)
    aside.replace(path)
    _sync(path.parent)


def _sync(path: Path) -> None:
    """What was written is on the disk when this returns."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _box(starts: list[int], lengths: list[int]) -> Box:
    return tuple(slice(start, start + length) for start, length in zip(starts, lengths, strict=True))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
