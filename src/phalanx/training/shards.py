"""The weights of a training run as they lie on its ranks, for who wants them elsewhere: a serving engine, say."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from phalanx.layout import Partition

if TYPE_CHECKING:
    from phalanx.training.engine import TrainingEngine


class Shards(Mapping[str, tuple[Partition, Tensor]]):
    """Name -> (how the parameter is cut over the tensor-parallel group, this rank's shard), in what it computes with.

    A parameter that has several names is there under the first. Nothing is copied, except at ZeRO stage 3: there a
    shard is put together from the data-parallel ranks when it is looked up, so all ranks look up the same ones in the
    same order.
    """

    def __init__(self, engine: TrainingEngine) -> None:
        self._parameters = dict(engine.module.named_parameters())
        self._registry = engine.registry
        self._compute = engine.compute_dtype

    def __getitem__(self, name: str) -> tuple[Partition, Tensor]:
        value = self._parameters[name].detach()
        if isinstance(value, DTensor):
            value = value.full_tensor()
            if self._compute is not None and value.is_floating_point():
                value = value.to(self._compute)
        return self._registry[name].partition, value

    def fact(self, name: str) -> tuple[Partition, tuple[int, ...], torch.dtype]:
        """The partition, and the shard's shape and dtype, without looking it up: a rank may ask by itself."""
        value = self._parameters[name]
        casts = isinstance(value, DTensor) and self._compute is not None and value.is_floating_point()
        dtype = self._compute if casts and self._compute is not None else value.dtype
        return self._registry[name].partition, tuple(value.shape), dtype

    def __iter__(self) -> Iterator[str]:
        return iter(self._parameters)

    def __len__(self) -> int:
        return len(self._parameters)
