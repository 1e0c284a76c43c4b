"""Weights in safetensors files."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path

import torch
from safetensors import safe_open

from phalanx.weights.sharded import Header, ShardedSource
from phalanx.weights.source import TensorInfo

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000


class SafetensorsSource(ShardedSource):
    """Reads by slice: only the bytes of the slice are touched (for a cut of a later dimension, only its rows' pages).

    A file is opened for each read: pages of a file that stays mapped count as resident memory of the process, so that
    every rank would seem to hold the whole checkpoint.
    """

    def read_header(self, path: Path) -> Header:
        return read_header(path)

    def map_tensor(self, path: Path, name: str, index: tuple[slice, ...] | None) -> torch.Tensor:
        with safe_open(path, framework="pt") as file:
            return file.get_tensor(name) if index is None else file.get_slice(name)[index]


def read_header(path: Path) -> Header:
    """The tensors that the header of a file announces, checked against each other and against the file's size."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        if size < _LENGTH_BYTES or length > min(size - _LENGTH_BYTES, _MAX_HEADER_BYTES):
            return Header({}, [f"{path} is truncated or corrupt: {size} bytes cannot hold a header of {length} bytes"])
        text = file.read(length)
    duplicates: list[str] = []
    try:
        entries = json.loads(text, object_pairs_hook=lambda pairs: _unique(pairs, duplicates))
        entries.pop("__metadata__", None)
        spans = {name: _span(name, entry) for name, entry in entries.items()}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        return Header({}, [f"{path} is corrupt: its header cannot be understood ({error!r})"])
    problems = [f"{path} is corrupt: its header names {name!r} twice" for name in duplicates]
    problems += _misplaced(path, spans, size - _LENGTH_BYTES - length)
    return Header({name: info for name, (_, _, info) in spans.items()}, problems)


def _unique(pairs: list[tuple[str, object]], duplicates: list[str]) -> dict[str, object]:
    result = dict(pairs)
    if len(result) < len(pairs):
        keys = [key for key, _ in pairs]
        duplicates.extend(sorted({key for key in keys if keys.count(key) > 1}))
    return result


def _span(name: str, entry: dict) -> tuple[int, int, TensorInfo]:
    begin, end = entry["data_offsets"]
    shape = tuple(entry["shape"])
    if not all(type(number) is int and number >= 0 for number in (begin, end, *shape)):
        raise ValueError(f"offsets and shape of {name} must be counts, got {entry}")
    if entry["dtype"] not in DTYPES:
        raise ValueError(f"{name} has the unknown dtype {entry['dtype']!r}")
    return begin, end, TensorInfo(shape, DTYPES[entry["dtype"]])


def _misplaced(path: Path, spans: dict[str, tuple[int, int, TensorInfo]], available: int) -> list[str]:
    """What is wrong with where the tensors lie: they must fill the data from its start to its end, without overlap."""
    problems = []
    covered = 0
    for name, (begin, end, info) in sorted(spans.items(), key=lambda item: item[1][:2]):
        needed = prod(info.shape) * info.dtype.itemsize
        if end - begin != needed:
            problems.append(f"{path} is corrupt: {name} of {info} needs {needed} bytes, its span has {end - begin}")
        if begin < covered:
            problems.append(f"{path} is corrupt: {name} overlaps the tensor before it by {covered - begin} bytes")
        elif begin > covered:
            problems.append(f"{path} is corrupt: no tensor owns the {begin - covered} bytes before {name}")
        covered = max(covered, end)
    if covered > available:
        problems.append(f"{path} is truncated: its tensors need {covered} bytes of data, it has {available}")
    elif covered < available:
        problems.append(f"{path} is corrupt: no tensor owns its last {available - covered} bytes")
    return problems
