"""A checkpoint of one or several files in a folder, whatever their format."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import torch

from phalanx.weights.source import TensorInfo, WeightError, WeightSource, fill, unknown_tensor


class Header(NamedTuple):
    """What one file holds, and what is wrong with it."""

    tensors: Mapping[str, TensorInfo]
    problems: Sequence[str]


class ShardedSource(WeightSource):
    """Files of one format. With a `weight_map` (tensor name -> file) that is the authority on what the checkpoint
    holds; without, it is the union of the files. Headers are read once, values on demand.
    """

    def __init__(self, folder: Path, files: Sequence[str], weight_map: Mapping[str, str] | None = None) -> None:
        self.folder = folder
        self._files = list(files)
        self._weight_map = weight_map
        self._headers: dict[str, Header] = {}
        self._known: Mapping[str, str] | None = weight_map

    @abstractmethod
    def read_header(self, path: Path) -> Header:
        """The tensors of a file that exists; never raises for a bad file, but lists its problems."""

    @abstractmethod
    def map_tensor(self, path: Path, name: str, index: tuple[slice, ...] | None) -> torch.Tensor:
        """A tensor of a file, or the part at `index`; it may lie in the mapped file."""

    def names(self) -> Sequence[str]:
        return list(self._locations())

    def info(self, name: str) -> TensorInfo:
        file = self._file_of(name)
        header = self._header(file)
        if name not in header.tensors:
            raise WeightError(*(header.problems or [self._lacks(file, name)]))
        return header.tensors[name]

    def read(self, name: str, index: tuple[slice, ...] | None = None) -> torch.Tensor:
        return self._mapped(name, index).clone(memory_format=torch.contiguous_format)

    def read_into(self, out: torch.Tensor, name: str, index: tuple[slice, ...] | None = None) -> None:
        fill(out, self._mapped(name, index), name)

    def _mapped(self, name: str, index: tuple[slice, ...] | None) -> torch.Tensor:
        path = self.folder / self._file_of(name)
        try:
            return self.map_tensor(path, name, index)
        except WeightError:
            raise
        except Exception as error:
            raise WeightError(f"cannot read {name} from {path}: {error}") from error

    def verify(self) -> list[str]:
        problems = [problem for file in self._files for problem in self._header(file).problems]
        holders: dict[str, list[str]] = defaultdict(list)
        for file in self._files:
            for name in self._header(file).tensors:
                holders[name].append(file)
        for name, files in holders.items():
            if len(files) > 1:
                problems.append(f"{name} is stored in {len(files)} files of {self.folder}: {', '.join(files)}")
        for name, file in (self._weight_map or {}).items():
            header = self._header(file)
            if name not in header.tensors and not header.problems:
                problems.append(self._lacks(file, name))
        return problems

    def _lacks(self, file: str, name: str) -> str:
        return f"{self.folder / file} lacks {name}, which the index places there"

    def _locations(self) -> Mapping[str, str]:
        if self._known is None:
            problems = [problem for file in self._files for problem in self._header(file).problems]
            if problems:
                raise WeightError(*problems)
            self._known = {name: file for file in self._files for name in self._header(file).tensors}
        return self._known

    def _file_of(self, name: str) -> str:
        locations = self._locations()
        if name not in locations:
            raise unknown_tensor(name, locations, self.folder)
        return locations[name]

    def _header(self, file: str) -> Header:
        if file not in self._headers:
            path = self.folder / file
            if path.is_file():
                self._headers[file] = self.read_header(path)
            else:
                self._headers[file] = Header({}, [f"file {path} is absent: fetch it, or correct the index"])
        return self._headers[file]


def read_index(path: Path) -> dict[str, str]:
    """The map tensor name -> file of a `*.index.json`. Raises WeightError where it is unusable."""
    try:
        weight_map = json.loads(path.read_bytes())["weight_map"]
        entries = list(weight_map.items())
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise WeightError(f"{path} is not an index of weights (an object with a weight_map): {error!r}") from error
    outside = sorted({str(file) for _, file in entries if not _is_plain_file_name(file)})
    if outside:
        raise WeightError(*(f"{path} names {file!r}, which is not a file in its folder" for file in outside))
    return dict(entries)


def _is_plain_file_name(file: object) -> bool:
    return isinstance(file, str) and bool(file) and PurePosixPath(file).name == file and "\\" not in file
