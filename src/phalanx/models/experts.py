"""The experts of a mixture-of-experts layer: how their weights are cut and laid out, and how they compute.

Every rank has a part of every expert: the first projections are cut by output features, the second by input features.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from phalanx.layout.partition import Block, Partition, copy_part
from phalanx.models.layers import Linear, as_prepared, prepared
from phalanx.models.parameter import InferenceParameter
from phalanx.models.placement import Placement
from phalanx.ops.linear import linear
from phalanx.ops.moe import ExpertsBackend, PreparedExperts, route


class ExpertsParameter(InferenceParameter):
    """An InferenceParameter that keeps the prepared experts which its tensors make up."""

    def __init__(self, experts: PreparedExperts) -> None:
        super().__init__(experts.data, experts.layout, experts.shape, experts.aux)
        self.experts = experts


class OneExpert:
    """One expert's weight [out, in] of a tensor [experts, out, in] (or lazy file tensor); as lazy as that is."""

    def __init__(self, source: Any, expert: int) -> None:
        self._source = source
        self._place = slice(expert, expert + 1)
        self.dtype: torch.dtype = source.dtype
        self.shape = tuple(source.shape[1:])

    def __getitem__(self, index: tuple[slice, ...]) -> Tensor:
        part: Tensor = self._source[self._place, *index]
        return part[0]

    def read_into(self, out: Tensor, index: tuple[slice, ...]) -> None:
        """Writes a slice into ``out``, which has its shape and any dtype and device."""
        copy_part(out[None], self._source, (self._place, *index))


class Experts:
    """Router and experts of a layer, this rank's part of each.

    Args:
        placement: where they lie.
        num_experts, per_token: how many there are, and how many a token goes to.
        normalize: whether the weights of a token's experts are divided by their sum.
        hidden_size, intermediate_size: full sizes of an expert.
        gated: whether an expert's first projection is [gate; up] rather than up.
        activate: what comes between an expert's projections.

    Raises:
        ValueError: the placement quantises, which no back end of experts can.
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
        if placement.quantization is not None:
            raise ValueError(
                f"quantization={placement.asked_quantization!r} is not there for models with experts: leave it out"
            )
        if placement.batch_invariant and placement.device.type == "cuda":
            raise ValueError("batch_invariant is not there for models with experts on a GPU: leave it out")
        self.placement = placement
        self.num_experts, self.per_token, self.normalize = num_experts, per_token, normalize
        block = Block(intermediate_size)
        blocks = (block, block) if gated else (block,)
        self.first = Linear(placement, Partition.column(blocks), hidden_size, len(blocks) * intermediate_size)
        self.second = Linear(placement, Partition.row((block,)), intermediate_size, hidden_size)
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
        return self._transform(value, self.first)

    def transform_second(self, value: Any) -> InferenceParameter:
        """The second projections: [experts, hidden, in], or [hidden, in] for each expert.

        Raises:
            ValueError: another number of experts, or of another shape.
        """
        return self._transform(value, self.second)

    def _transform(self, value: Any, projection: Linear) -> InferenceParameter:
        """One expert after the other is cut and prepared, so that a rank never holds more beside what it serves."""
        fused = hasattr(value, "shape")
        experts = [OneExpert(value, expert) for expert in range(value.shape[0])] if fused else list(value)
        if len(experts) != self.num_experts:
            raise ValueError(f"given {len(experts)} experts, expected {self.num_experts}")
        cut = (projection.cut(given if isinstance(given, (list, tuple)) else [given]) for given in experts)
        return ExpertsParameter(self._backend.prepare(cut, len(experts), self.placement.forced.get("linear")))

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
