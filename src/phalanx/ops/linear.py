"""Matrix products with weights that are prepared once: re-laid at load into the layout that the device likes.

A prepared weight is plain tensors and the name of their layout, so it can be saved as it is and made again from the
saved parts; the weight that it came from is not kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from phalanx.ops import registry


@dataclass(frozen=True, eq=False)
class PreparedWeight:
    """A linear weight `[out_features, in_features]` in the layout named `layout` (the name of a linear back end).

    `data` and `aux` (scales and the like) are all that has to be saved, beside `layout` and the two sizes.
    """

    data: Tensor
    layout: str
    out_features: int
    in_features: int
    dtype: torch.dtype
    aux: Mapping[str, Tensor] = field(default_factory=dict)

    @cached_property
    def backend(self) -> LinearBackend:
        """The back end of this layout. ValueError where it cannot run."""
        return registry.select("linear", device=self.data.device, dtype=self.dtype, forced=self.layout)


class LinearBackend(Protocol):
    """One way to hold a linear weight and to multiply with it. Its name in the registry is the layout."""

    def prepare(self, weight: Tensor) -> PreparedWeight:
        """weight `[out, in]` in this back end's layout."""

    def apply(self, x: Tensor, weight: PreparedWeight, bias: Tensor | None) -> Tensor:
        """x `[..., in]` -> `[..., out]`."""

    def lookup(self, weight: PreparedWeight, ids: Tensor) -> Tensor:
        """Rows `ids` of the original weight, exactly: `[*ids.shape, in]`."""

    def restore(self, weight: PreparedWeight) -> Tensor:
        """The original weight `[out, in]`, exactly."""


def prepare_linear(weight: Tensor, *, forced: str | None = None) -> PreparedWeight:
    """weight `[out, in]` in the layout of the best back end of its device and dtype, or of the one named `forced`."""
    if weight.dim() != 2:
        raise ValueError(f"prepare_linear takes a weight [out, in]; got a tensor of shape {tuple(weight.shape)}")
    return registry.select("linear", device=weight.device, dtype=weight.dtype, forced=forced).prepare(weight)


def linear(x: Tensor, weight: PreparedWeight, bias: Tensor | None = None) -> Tensor:
    """`x @ weight.T + bias`; x `[..., in]` of the weight's dtype, bias `[out]` -> `[..., out]`, contiguous."""
    return weight.backend.apply(x, weight, bias)


def embedding_lookup(weight: PreparedWeight, ids: Tensor) -> Tensor:
    """Rows of a prepared weight, exactly, so that a tied head needs no second copy: ids `[...]` -> `[..., in]`."""
    return weight.backend.lookup(weight, ids)


def restore_weight(weight: PreparedWeight) -> Tensor:
    """The original weight `[out, in]`, exactly."""
    return weight.backend.restore(weight)


class PlainLinear:
    """The weight as it is, and `F.linear`."""

    def prepare(self, weight: Tensor) -> PreparedWeight:
        return PreparedWeight(weight, "plain", weight.shape[0], weight.shape[1], weight.dtype)

    def apply(self, x: Tensor, weight: PreparedWeight, bias: Tensor | None) -> Tensor:
        return F.linear(x, weight.data, bias)

    def lookup(self, weight: PreparedWeight, ids: Tensor) -> Tensor:
        return F.embedding(ids, weight.data)

    def restore(self, weight: PreparedWeight) -> Tensor:
        return weight.data


registry.register("linear", "plain", PlainLinear())
