"""The experts of a mixture-of-experts layer: how their weights are cut and laid out, and how they compute.

Every rank has a part of every expert: the first projections are cut by output features, the second by input features.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from phalanx.layout.partition import Block, Partition
from phalanx.models.layers import Placement, as_prepared, prepared, split_sizes
from phalanx.models.parameter import InferenceParameter
from phalanx.ops.linear import linear
from phalanx.ops.moe import ExpertsBackend, PreparedExperts, route


class ExpertsParameter(InferenceParameter):
    """An InferenceParameter that keeps the prepared experts which its tensors make up."""

    def __init__(self, experts: PreparedExperts) -> None:
        super().__init__(experts.data, experts.layout, experts.shape, experts.aux)
        self.experts = experts


class Experts:
    """Router and experts of a layer, this rank's part of each.

    Args:
        placement: where they lie.
        num_experts, per_token: how many there are, and how many a token goes to.
        normalize: whether the weights of a token's experts are divided by their sum.
        hidden_size, intermediate_size: full sizes of an expert.
        gated: whether an expert's first projection is [gate; up] rather than up.
        activate: what comes between an expert's projections.
    """

    def __init__(
        self,
        placement: Placement,
        num_experts: int,
        per_token: int,
        normalize: bool,
        hidden_size: int,
        intermediate_size: int,
        gated: bool,
        activate: Callable[[Tensor], Tensor],
    ) -> None:
        self.placement = placement
        self.num_experts, self.per_token, self.normalize = num_experts, per_token, normalize
        self.hidden_size = hidden_size
        self.blocks = (Block(intermediate_size),) * (2 if gated else 1)
        self.activate = activate
        self._backend: ExpertsBackend = placement.op("moe")

    def transform_gate(self, value: Any) -> InferenceParameter:
        """The router's weight [experts, hidden], whole on every rank."""
        return prepared(self.placement.cut(value, Partition.replicate()), self.placement)

    def transform_first(self, value: Any) -> InferenceParameter:
        """The first projections: [experts, out, hidden], or for each expert [out, hidden] or its parts in block order.

        Raises:
            ValueError: another number of experts, or parts that do not make up a weight.
        """
        sizes = split_sizes(self.blocks, self.placement.group)
        out = self._room(sum(sizes), self.hidden_size)
        if hasattr(value, "shape"):
            whole = sum(block.size for block in self.blocks)
            _check([value.shape], [(self.num_experts, whole, self.hidden_size)])
            self.placement.cut_into(out, value, Partition.column(self.blocks, dim=1))
            return self._prepared(out)
        for place, given in zip(out, self._listed(value), strict=True):
            parts = given if isinstance(given, (list, tuple)) else [given]
            if len(parts) == 1:
                _check([parts[0].shape], [(sum(block.size for block in self.blocks), self.hidden_size)])
                self.placement.cut_into(place, parts[0], Partition.column(self.blocks))
                continue
            _check([part.shape for part in parts], [(block.size, self.hidden_size) for block in self.blocks])
            for rows, part, block in zip(place.split_with_sizes(sizes), parts, self.blocks, strict=True):
                self.placement.cut_into(rows, part, Partition.column((block,)))
        return self._prepared(out)

    def transform_second(self, value: Any) -> InferenceParameter:
        """The second projections: [experts, hidden, in], or [hidden, in] for each expert.

        Raises:
            ValueError: another number of experts, or of another shape.
        """
        block = self.blocks[0]
        partition = Partition.row((block,))
        out = self._room(self.hidden_size, split_sizes((block,), self.placement.group)[0])
        if hasattr(value, "shape"):
            _check([value.shape], [(self.num_experts, self.hidden_size, block.size)])
            self.placement.cut_into(out, value, partition)
            return self._prepared(out)
        for place, part in zip(out, self._listed(value), strict=True):
            _check([part.shape], [(self.hidden_size, block.size)])
            self.placement.cut_into(place, part, partition)
        return self._prepared(out)

    def _room(self, rows: int, columns: int) -> Tensor:
        size = (self.num_experts, rows, columns)
        return torch.empty(size, dtype=self.placement.dtype, device=self.placement.device)

    def _listed(self, value: Any) -> list[Any]:
        parts = list(value)
        if len(parts) != self.num_experts:
            raise ValueError(f"given {len(parts)} experts, expected {self.num_experts}")
        return parts

    def _prepared(self, weight: Tensor) -> ExpertsParameter:
        return ExpertsParameter(self._backend.prepare(weight, self.placement.forced.get("linear")))

    def __call__(
        self, hidden: Tensor, gate: InferenceParameter, first: ExpertsParameter, second: ExpertsParameter
    ) -> Tensor:
        """hidden [T, hidden] -> [T, hidden] of this rank, to be added up over the ranks."""
        weights, ids = route(linear(hidden, as_prepared(gate)), self.per_token, self.normalize)
        return self._backend.apply(hidden, weights, ids, first.experts, second.experts, self.activate)


def restored_experts(
    data: Tensor, layout: str, shape: Sequence[int], dtype: torch.dtype, aux: Mapping[str, Tensor]
) -> ExpertsParameter:
    """The parameter of saved experts."""
    count, out_features, in_features = shape
    return ExpertsParameter(PreparedExperts(data, layout, (count, out_features, in_features), dtype, aux))


def _check(given: list[Any], expected: list[tuple[int, ...]]) -> None:
    shapes = [tuple(shape) for shape in given]
    if shapes != expected:
        raise ValueError(
            f"given {' + '.join(map(str, shapes))} for an expert's weight, expected {' + '.join(map(str, expected))}"
        )
