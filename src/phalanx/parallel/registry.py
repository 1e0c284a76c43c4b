"""How every parameter of a module is cut, by its qualified name: the one record that training, checkpoints and export
read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import nn

from phalanx.layout import Partition, Piece, local_shape, pieces


@dataclass(frozen=True)
class ParameterLayout:
    """One parameter: its whole shape, how it is cut, and why.

    `partial`: the parameter is the same on all ranks, but the gradient that a rank computes is only its part, because
    the parameter acts inside a region in which the ranks hold different activations. The whole gradient is their sum.
    """

    name: str
    shape: tuple[int, ...]
    partition: Partition
    partial: bool = False
    reason: str = ""


class LayoutRegistry(Mapping[str, ParameterLayout]):
    """The layouts of a module's parameters, under the names of `named_parameters()` (a tied parameter once)."""

    def __init__(self, layouts: Mapping[str, ParameterLayout], tp_rank: int = 0, tp_size: int = 1) -> None:
        self._layouts = dict(layouts)
        self.tp_rank = tp_rank
        self.tp_size = tp_size

    @classmethod
    def whole(cls, module: nn.Module) -> LayoutRegistry:
        """The layouts of a module that is not cut."""
        return cls(
            {
                name: ParameterLayout(name, tuple(parameter.shape), Partition.replicate(), reason="not cut")
                for name, parameter in module.named_parameters()
            }
        )

    def __getitem__(self, name: str) -> ParameterLayout:
        try:
            return self._layouts[name]
        except KeyError:
            raise KeyError(
                f"no layout for a parameter called {name!r}: was it added after the model was cut?"
            ) from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._layouts)

    def __len__(self) -> int:
        return len(self._layouts)

    def pieces(self, name: str) -> list[Piece]:
        """The boxes of this rank's shard."""
        layout = self[name]
        return pieces(layout.partition, layout.shape, self.tp_rank, self.tp_size)

    def local_shape(self, name: str) -> tuple[int, ...]:
        """The shape of this rank's shard."""
        layout = self[name]
        return local_shape(layout.partition, layout.shape, self.tp_rank, self.tp_size)

    def count_once(self, name: str) -> list[tuple[tuple[slice, ...], float]]:
        """Boxes of this rank's shard and their weights: over all ranks, every logical element weighs 1."""
        return [(piece.local_slices, 1 / piece.copies) for piece in self.pieces(name)]
