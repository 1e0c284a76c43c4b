"""What is decided for one weight, and the rule from which it follows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from phalanx.layout.partition import Partition
from phalanx.layout.rules import LayerSpec, PartitionType

Style = Literal["column", "row", "vocab", "experts", "skip"]


@dataclass(frozen=True)
class Decision:
    """How one weight is cut, and what the layer that uses it does.

    style          "experts": cut inside of each expert, `weight.kind` says whether by output or input features.
    weight         the cut of the weight; `replicate` for "skip".
    bias           the cut of its bias, None without one: as the output for column and vocab; replicated for row, where
                   it is added once, after the reduction.
    gather_output  column, vocab: every rank gets the whole output.
    split_input    row: the input is whole on every rank, and the layer takes its part of it.
    sum_gradient   skip: the weight lies between cut weights, so that each rank computes a part of its gradient.
    source         the rule that decided, for people.
    hand_written   it is a rule of the user.
    """

    style: Style
    weight: Partition
    bias: Partition | None = None
    gather_output: bool = False
    split_input: bool = False
    sum_gradient: bool = False
    source: str = ""
    hand_written: bool = False

    @property
    def is_cut(self) -> bool:
        """Whether ranks hold different parts of the weight."""
        return self.style != "skip"

    @property
    def splits_output(self) -> bool:
        """Whether each rank gets a part of the output features only."""
        return self.weight.kind == "column" and not self.gather_output


@dataclass(frozen=True)
class Rule:
    """What some source says of one weight. `family`: the model type whose fused layouts hold."""

    style: PartitionType
    source: str
    family: str | None = None
    spec: LayerSpec | None = None
    hand_written: bool = False
    gather_output: bool = False
    split_input: bool = False
    sum_gradient: bool = False
    transposed: bool = False
