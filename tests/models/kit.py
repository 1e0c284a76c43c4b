"""Small things that the tests of the kit share: a model that is no model, parameters, a source that records reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from phalanx.config import EngineConfig
from phalanx.distributed.group import Group, SoloGroup
from phalanx.models import HFConfig, InferenceParameter, ParameterBase, ParametrizedList, TransformerModel
from phalanx.weights import WeightSource
from phalanx.weights.source import TensorInfo


class Experts(ParametrizedList):
    """A list as long as the model's ``n_experts``."""

    count_attr = "n_experts"


def stub(**values: Any) -> Any:
    """What a Parameter or container asks of its model, and nothing else."""
    return SimpleNamespace(device=torch.device("cpu"), **values)


def whole(tensor: Any) -> InferenceParameter:
    """A served parameter as it came."""
    return InferenceParameter(tensor)


class One(ParameterBase):
    """A parameter of one tensor."""

    params: torch.Tensor

    def finalize(self) -> InferenceParameter | None:
        return whole(self.params)


class Pair(ParameterBase):
    """A parameter of two tensors, one below the other."""

    first: torch.Tensor
    second: torch.Tensor

    def finalize(self) -> InferenceParameter | None:
        return whole(torch.cat((self.first, self.second)))


class Maybe(ParameterBase):
    """A parameter that a checkpoint may lack; the stub's ``has_bias`` says whether this one has it, None: either."""

    params: torch.Tensor | None

    def finalize(self) -> InferenceParameter | None:
        return None if self.params is None else whole(self.params)

    def required(self, dependency: str) -> bool | None:
        return getattr(self.inference_model, "has_bias", None)


class Stack(ParameterBase):
    """A parameter of a list."""

    experts: Experts

    def finalize(self) -> InferenceParameter | None:
        return whole(torch.stack(tuple(self.experts)) if len(self.experts) else torch.empty(0))


class RecordingSource(WeightSource):
    """Tensors in memory that must be sliced, and a record of what was read: (name, bounds of each dimension)."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = dict(tensors)
        self.reads: list[tuple[str, tuple[tuple[int, int], ...]]] = []

    def names(self) -> Sequence[str]:
        return list(self.tensors)

    def info(self, name: str) -> TensorInfo:
        return TensorInfo(tuple(self.tensors[name].shape), self.tensors[name].dtype)

    def read(self, name: str, index: tuple[slice, ...] | None = None) -> Tensor:
        value = self.tensors[name]
        slices = index or tuple(slice(0, size) for size in value.shape)
        bounds = [part.indices(size)[:2] for part, size in zip(slices, value.shape, strict=False)]
        self.reads.append((name, tuple(bounds)))
        return value[slices].clone()

    def elements_read(self) -> int:
        """Elements of all reads together."""
        return sum(torch.Size(stop - start for start, stop in bounds).numel() for _, bounds in self.reads)


def bare_model(
    config: Mapping[str, Any],
    group: Group | None = None,
    kind: type[TransformerModel] = TransformerModel,
    **settings: Any,
) -> TransformerModel:
    """A model without parameters."""
    return kind(
        HFConfig(config), EngineConfig(**{"device": "cpu", "dtype": "float32", **settings}), group or SoloGroup()
    )


def numbered(*shape: int) -> Tensor:
    """A float32 tensor whose elements all differ."""
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)
