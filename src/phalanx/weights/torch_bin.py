"""Weights in files of torch.save (`*.bin`, `*.pt`, `*.pth`), read without running any code that they hold."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from phalanx.weights.sharded import Header, ShardedSource
from phalanx.weights.source import TensorInfo, WeightError


class TorchBinSource(ShardedSource):
    """State dicts of torch.save, `weights_only`: a file that would run code is refused.

    Files are mapped for each read, like those of safetensors. The format before torch 1.6 cannot be mapped: such a file
    is read whole at first use and kept.
    """

    def __init__(self, folder: Path, files: Sequence[str], weight_map: Mapping[str, str] | None = None) -> None:
        super().__init__(folder, files, weight_map)
        self._kept: dict[Path, dict[str, torch.Tensor]] = {}

    def read_header(self, path: Path) -> Header:
        try:
            tensors = self._load(path)
        except WeightError as error:
            return Header({}, error.problems)
        return Header({name: TensorInfo(tuple(value.shape), value.dtype) for name, value in tensors.items()}, [])

    def map_tensor(self, path: Path, name: str, index: tuple[slice, ...] | None) -> torch.Tensor:
        value = self._load(path)[name].detach()
        return value if index is None else value[index]

    def _load(self, path: Path) -> dict[str, torch.Tensor]:
        if path in self._kept:
            return self._kept[path]
        mapped = zipfile.is_zipfile(path)
        try:
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
        except Exception as error:  # the unpickler of a corrupt file raises nearly anything
            raise WeightError(f"{path} is truncated, corrupt, or no plain state dict of tensors: {error}") from error
        if not isinstance(content, dict):
            raise WeightError(f"{path} holds a {type(content).__name__}, not a dict of tensors")
        others = [str(name) for name, value in content.items() if not isinstance(value, torch.Tensor)]
        if others:
            raise WeightError(f"{path} is not a plain state dict: {', '.join(others[:5])} is not a tensor")
        if not mapped:
            self._kept[path] = content
        return content
