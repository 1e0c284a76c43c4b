"""One way in: whatever a user has, as a WeightSource."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from phalanx.weights.folder import open_file, open_folder
from phalanx.weights.hub import snapshot
from phalanx.weights.memory import MemorySource
from phalanx.weights.names import WeightError, is_hub_id
from phalanx.weights.source import WeightSource


def open_source(obj: Any, *, revision: str | None = None) -> WeightSource:
    """The weights in `obj`: a folder, a file, a hub id, a module, a mapping or pairs of (name, tensor), or a source.

    An existing path wins over a hub id of the same spelling; `revision` is for hub ids. Reads no values; call
    `verify()` of the result for all that is wrong with it. Raises WeightError if there are no weights to be found, and
    TypeError for an object of another kind.
    """
    if isinstance(obj, WeightSource):
        return obj
    if isinstance(obj, str | os.PathLike):
        return _open_path(os.fspath(obj), revision)
    if isinstance(obj, nn.Module):
        return MemorySource.from_module(obj)
    if isinstance(obj, Mapping):
        return MemorySource(obj)
    if isinstance(obj, Iterable):
        return MemorySource.from_pairs(obj)
    raise TypeError(
        f"cannot read weights from a {type(obj).__name__}: pass a path, a hub id, a module, a mapping or pairs of "
        "(name, tensor), or a WeightSource"
    )


def _open_path(name: str, revision: str | None) -> WeightSource:
    path = Path(name).expanduser()
    if path.is_dir():
        return open_folder(path)
    if path.is_file():
        return open_file(path)
    if not is_hub_id(name):
        raise WeightError(f"there is no folder or file {name!r}, and it is not a hub id (owner/name) either")
    return open_folder(snapshot(name, revision))
