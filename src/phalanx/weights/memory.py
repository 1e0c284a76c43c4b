"""Weights that are in memory already: a module, a mapping, or pairs of names and tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import nn

from phalanx.weights.source import SourceTensor, TensorInfo, WeightError, WeightSource, unknown_tensor


class MemorySource(WeightSource):
    """Tensors by name. What it reads are views of them, so later changes in place show."""

    def __init__(self, tensors: Mapping[str, torch.Tensor | SourceTensor]) -> None:
        self._tensors = dict(tensors)

    @classmethod
    def from_module(cls, module: nn.Module) -> MemorySource:
        """The parameters and persistent buffers of a module under the names of its `state_dict()`.

        A tied parameter appears under each of its names.
        """
        return cls(module.state_dict())

    @classmethod
    def from_pairs(cls, pairs: Iterable[tuple[str, torch.Tensor | SourceTensor]]) -> MemorySource:
        """All pairs of an iterable, which is used up and held. Raises WeightError for a name that comes twice."""
        tensors: dict[str, torch.Tensor | SourceTensor] = {}
        for name, value in pairs:
            if name in tensors:
                raise WeightError(f"the pairs of names and tensors give {name!r} twice")
            tensors[name] = value
        return cls(tensors)

    def names(self) -> Sequence[str]:
        return list(self._tensors)

    def info(self, name: str) -> TensorInfo:
        value = self._get(name)
        return TensorInfo(tuple(value.shape), value.dtype)

    def read(self, name: str, index: tuple[slice, ...] | None = None) -> torch.Tensor:
        value = self._get(name)
        if isinstance(value, SourceTensor):
            return value.load() if index is None else value[index]
        return value.detach() if index is None else value.detach()[index]

    def verify(self) -> list[str]:
        problems = []
        values: Mapping[str, object] = self._tensors  # what a caller gave may be anything
        for name, value in values.items():
            if not isinstance(value, torch.Tensor | SourceTensor):
                problems.append(f"{name} is a {type(value).__name__}, not a tensor")
            elif isinstance(value, torch.Tensor) and value.is_meta:
                problems.append(f"{name} has no values, it is on the meta device: load the weights first")
        return problems

    def _get(self, name: str) -> torch.Tensor | SourceTensor:
        if name not in self._tensors:
            raise unknown_tensor(name, self._tensors, "the given weights")
        return self._tensors[name]
