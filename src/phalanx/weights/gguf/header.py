"""The header of a GGUF file: metadata, and where each tensor lies.

The reader of the `gguf` package takes seconds for a vocabulary of 50,000 tokens and maps the file for as long as it
lives; here the header is read once and nothing of the file is held.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

_VERSIONS = (2, 3)
_MAX_DIMS = 4
_DEFAULT_ALIGNMENT = 32
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


@dataclass(frozen=True)
class StoredTensor:
    """A tensor as the header announces it. `type` is the number of a ggml type, `offset` counts from the file start."""

    shape: tuple[int, ...]
    type: int
    offset: int

    @property
    def elements(self) -> int:
        return prod(self.shape)


@dataclass
class GGUFHeader:
    """What a file announces; `problems` says why it cannot be understood (metadata and tensors are then partial)."""

    metadata: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, StoredTensor] = field(default_factory=dict)
    file_bytes: int = 0
    problems: list[str] = field(default_factory=list)


def read_header(path: Path) -> GGUFHeader:
    """Read a file's header. Never raises for a bad file: it lists the problems instead."""
    header = GGUFHeader(file_bytes=path.stat().st_size)
    if header.file_bytes < 24:
        header.problems.append(f"{path} is truncated or no GGUF file: it has {header.file_bytes} bytes")
        return header
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        try:
            _read(_Cursor(data), header)
        except (ValueError, RecursionError) as error:
            header.problems.append(f"{path} is truncated, corrupt or no GGUF file: {error}")
    return header


class _Cursor:
    """Reads values one after another; ValueError where the file ends first."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self.position = 0

    def take(self, count: int) -> bytes:
        end = self.position + count
        if end > len(self._data):
            raise ValueError(f"{count} bytes are announced at byte {self.position} of {len(self._data)}")
        taken = self._data[self.position : end]
        self.position = end
        return taken

    def scalars(self, code: str, count: int = 1) -> tuple[Any, ...]:
        return struct.unpack(f"<{count}{code}", self.take(struct.calcsize(f"<{code}") * count))

    def text(self) -> str:
        (length,) = self.scalars("Q")
        # tokens of old vocabularies may be no valid UTF-8; such a token is never produced from text
        return self.take(length).decode("utf-8", errors="replace")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY:
            inner, count = self.scalars("I")[0], self.scalars("Q")[0]
            if inner in _SCALARS:
                return list(self.scalars(_SCALARS[inner], count))
            return [self.value(inner) for _ in range(count)]
        if kind in _SCALARS:
            return self.scalars(_SCALARS[kind])[0]
        raise ValueError(f"unknown kind {kind} of a metadata value at byte {self.position}")


def _read(cursor: _Cursor, header: GGUFHeader) -> None:
    magic = cursor.take(4)
    if magic != b"GGUF":
        raise ValueError(f"it begins with {magic!r}")
    (version,) = cursor.scalars("I")
    if version not in _VERSIONS:
        raise ValueError(f"its version {version} is not one of {_VERSIONS} in little-endian order")
    tensor_count, value_count = cursor.scalars("Q", 2)
    for _ in range(value_count):
        key = cursor.text()
        if key in header.metadata:
            raise ValueError(f"the metadata key {key!r} comes twice")
        header.metadata[key] = cursor.value(cursor.scalars("I")[0])
    announced = {}
    for _ in range(tensor_count):
        name = cursor.text()
        (dims,) = cursor.scalars("I")
        if name in announced or dims > _MAX_DIMS:
            raise ValueError(f"tensor {name!r} comes twice or has {dims} dimensions")
        shape = tuple(reversed(cursor.scalars("Q", dims)))  # stored with the fastest dimension first
        announced[name] = (shape, *cursor.scalars("I"), *cursor.scalars("Q"))
    alignment = header.metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1:
        raise ValueError(f"general.alignment is {alignment!r}")
    start = -(-cursor.position // alignment) * alignment
    header.tensors = {name: StoredTensor(shape, kind, start + at) for name, (shape, kind, at) in announced.items()}
