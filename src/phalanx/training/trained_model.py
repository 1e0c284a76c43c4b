"""A module whose forward is an engine's, for those who expect a module."""

from __future__ import annotations

from typing import Any, Self

from torch import nn

from phalanx.training.engine import TrainingEngine


class TrainedModel(nn.Module):
    """Stands around an engine's module as DistributedDataParallel stands around a module.

    `module`: the model itself; `engine`: the TrainingEngine that trains it.
    """

    def __init__(self, engine: TrainingEngine) -> None:
        super().__init__()
        self.module = engine.module
        self._held = (engine,)  # in a tuple, so that nn.Module does not look into it

    @property
    def engine(self) -> TrainingEngine:
        return self._held[0]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.engine(*args, **kwargs)

    def train(self, mode: bool = True) -> Self:
        self.training = mode
        self.engine.train(mode)
        return self

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.engine.zero_grad()
