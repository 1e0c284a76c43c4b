"""Matrix products with weights that are prepared once: re-laid at load into the layout that the device likes.

A prepared weight is plain tensors and the name of their layout, so it can be saved as it is and made again from the
saved parts; the weight that it came from is not kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.nn import functional as F

from phalanx.ops import registry


@dataclass(frozen=True, eq=False)
class PreparedWeight:
    """A linear weight `[out_features, in_features]` in the layout named `layout`.

    `data` and `aux` (scales and the like) are all that has to be saved, beside `layout` and the two sizes. `reader`
    names the back end that multiplies, where it was forced; else the best one that reads the layout does.
    """

    data: Tensor
    layout: str
    out_features: int
    in_features: int
    dtype: torch.dtype
    aux: Mapping[str, Tensor] = field(default_factory=dict)
    reader: str | None = None

    @cached_property
    def backend(self) -> LinearBackend:
        """The back end that multiplies with this weight. ValueError where none can."""
        return reader_of(self.layout, self.data.device, self.dtype, self.reader)


class LinearBackend(Protocol):
    """One way to hold a linear weight and to multiply with it.

    Its name in the registry is the layout, unless it has an attribute `layout`: several may read the same one.
    """

    def prepare(self, weight: Tensor) -> PreparedWeight:
        """weight `[out, in]` in this back end's layout."""

    def apply(self, x: Tensor, weight: PreparedWeight, bias: Tensor | None) -> Tensor:
        """x `[..., in]` -> `[..., out]`."""

    def lookup(self, weight: PreparedWeight, ids: Tensor) -> Tensor:
        """Rows `ids` of the original weight, exactly: `[*ids.shape, in]`."""

    def restore(self, weight: PreparedWeight) -> Tensor:
        """The original weight `[out, in]`, exactly."""


@runtime_checkable
class WideBackend(Protocol):
    """A linear back end that can give the sums that it has, in float32."""

    def apply_wide(self, x: Tensor, weight: PreparedWeight, bias: Tensor | None) -> Tensor:
        """x `[..., in]` -> float32 `[..., out]`."""


@runtime_checkable
class GatedBackend(Protocol):
    """A linear back end that can make a product and the gated activation of it at once."""

    def apply_gated(self, x: Tensor, weight: PreparedWeight, bias: Tensor | None, activation: str) -> Tensor | None:
        """x `[..., in]` -> `[..., out / 2]`: see `gated_linear`; None where that is not faster, or it cannot."""


@runtime_checkable
class TreeBackend(Protocol):
    """A linear back end whose sums over ranks are those of one rank."""

    def part(self, x: Tensor, weight: PreparedWeight, ranks: int) -> Tensor:
        """float32 [..., out]: this rank's part of a product whose K is shared by `ranks` in equal parts."""

    def join(self, parts: Tensor) -> Tensor:
        """parts [ranks, ...] of all ranks, in their order -> their sum."""


def reader_of(layout: str, device: torch.device, dtype: torch.dtype, forced: str | None = None) -> LinearBackend:
    """The best back end that multiplies with weights in `layout`, or the one named `forced`.

    ValueError where it cannot run, and where the one that is forced reads another layout.
    """
    names = {i.name: getattr(i.function, "layout", i.name) for i in registry.implementations("linear")}
    if forced is not None and names.get(forced, layout) != layout:
        raise ValueError(f"linear: {forced!r} reads weights in the layout {names[forced]!r}, not in {layout!r}")
    able = [
        i
        for i in registry.implementations("linear")
        if names[i.name] == layout and forced in (None, i.name) and i.supports(device, dtype)
    ]
    if able:
        return max(reversed(able), key=lambda i: i.priority).function
    # Says why not.
    return registry.select("linear", device=device, dtype=dtype, forced=forced or layout)


def prepare_linear(weight: Tensor, *, forced: str | None = None, layout: str | None = None) -> PreparedWeight:
    """A weight `[out, in]`, laid out for the best back end of its device and dtype.

    Args:
        forced: the back end to take instead.
        layout: the layout to take instead, with its best back end.
    """
    if weight.dim() != 2:
        raise ValueError(f"prepare_linear takes a weight [out, in]; got a tensor of shape {tuple(weight.shape)}")
    if layout is not None:
        return reader_of(layout, weight.device, weight.dtype, forced).prepare(weight)
    prepared: PreparedWeight = registry.select(
        "linear", device=weight.device, dtype=weight.dtype, forced=forced
    ).prepare(weight)
    return prepared if forced is None else replace(prepared, reader=forced)


def linear(x: Tensor, weight: PreparedWeight, bias: Tensor | None = None) -> Tensor:
    """`x @ weight.T + bias`; x `[..., in]` of the weight's dtype, bias `[out]` -> `[..., out]`, contiguous."""
    return weight.backend.apply(x, weight, bias)


def wide_linear(x: Tensor, weight: PreparedWeight, bias: Tensor | None = None) -> Tensor:
    """`linear` with a result of float32 (or wider), not rounded to x's dtype on the way where the back end can."""
    backend = weight.backend
    if isinstance(backend, WideBackend):
        return backend.apply_wide(x, weight, bias)
    out = backend.apply(x, weight, bias)
    return out.to(torch.promote_types(out.dtype, torch.float32))


def gated_linear(x: Tensor, weight: PreparedWeight, bias: Tensor | None, activation: str) -> Tensor | None:
    """`gated_activation(linear(x, weight, bias), activation)`, not rounded between, where the back end makes both at
    once; else None."""
    backend = weight.backend
    return backend.apply_gated(x, weight, bias, activation) if isinstance(backend, GatedBackend) else None


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
