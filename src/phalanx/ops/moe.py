"""Mixture of experts: which experts a token goes to, and what their MLPs make of it.

The weights of all experts of a layer are prepared together, once, into the layout that a back end likes. Every result
of a token is the same whatever tokens stand beside it, as far as the device's matmul keeps that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from phalanx.ops import registry
from phalanx.ops.linear import PreparedWeight, linear, prepare_linear


def route(logits: Tensor, top_k: int, normalize: bool) -> tuple[Tensor, Tensor]:
    """The experts of each token, and their weights: a softmax over all experts, of which the largest are kept.

    Args:
        logits: [T, experts] of any floating dtype.
        normalize: whether the kept weights are divided by their sum.

    Returns:
        weights [T, top_k] in float32 (or wider, as the logits are), largest first; ids int64 [T, top_k].
    """
    chances = torch.softmax(logits, -1, dtype=torch.promote_types(logits.dtype, torch.float32))
    weights, ids = torch.topk(chances, top_k, dim=-1)
    return (weights / weights.sum(-1, keepdim=True) if normalize else weights), ids


@dataclass(frozen=True, eq=False)
class PreparedExperts:
    """The weights `[experts, out, in]` of a layer's experts in the layout named `layout`.

    `data` and `aux` are all that has to be saved, beside `layout` and `shape`. The layout begins with the name of the
    back end; after a colon may stand what else it has to know.
    """

    data: Tensor
    layout: str
    shape: tuple[int, int, int]
    dtype: torch.dtype
    aux: Mapping[str, Tensor] = field(default_factory=dict)

    @cached_property
    def each(self) -> tuple[PreparedWeight, ...]:
        """The linear weight of every expert, for the back end that keeps them apart."""
        _, _, layout = self.layout.partition(":")
        count, out_features, in_features = self.shape
        found = []
        for expert in range(count):
            data = self.aux[str(expert)] if expert else self.data
            prefix = f"{expert}."
            aux = {name.removeprefix(prefix): part for name, part in self.aux.items() if name.startswith(prefix)}
            found.append(PreparedWeight(data, layout, out_features, in_features, self.dtype, aux))
        return tuple(found)


class ExpertsBackend(Protocol):
    """One way to hold the weights of experts and to compute with them.

    Its name in the registry begins the layout, unless it has an attribute `layout`: several may read the same one.
    """

    def prepare(self, weights: Iterable[Tensor], count: int, linear_layout: str | None) -> PreparedExperts:
        """The weights `[out, in]` of `count` experts in this back end's layout.

        They are taken one by one, so that those before need not be held as they came. `linear_layout` is the layout
        of the `linear` op that the user forced, None for the best.
        """

    def apply(
        self,
        x: Tensor,
        weights: Tensor,
        ids: Tensor,
        first: PreparedExperts,
        second: PreparedExperts,
        activate: Callable[[Tensor], Tensor],
    ) -> Tensor:
        """x `[T, H]`, weights and ids `[T, k]` of `route` -> the weighted sum of `second(activate(first(x)))` over the
        experts of each token, `[T, H]`."""


def check_saved(
    layout: str,
    shape: Sequence[int],
    aux: Iterable[str],
    device: torch.device,
    dtype: torch.dtype,
    forced: Mapping[str, str],
) -> None:
    """ValueError where saved experts cannot be computed with here, the user forced another layout, or some are absent.

    `aux` are the names of their auxiliary tensors, `forced` the implementations of ops that the user forced.
    """
    names = dict(zip(("moe", "linear"), layout.split(":"), strict=False))
    for op, name in names.items():
        registry.select(op, device=device, dtype=dtype, forced=name)
        reader = forced.get(op, name)
        if getattr(registry.select(op, device=device, dtype=dtype, forced=reader), "layout", reader) != name:
            raise ValueError(f"{op}: this engine is told to use {reader!r}")
    if len(shape) != 3:
        raise ValueError(f"experts have a shape [experts, out, in], given {tuple(shape)}")
    absent = {str(expert) for expert in range(1, shape[0])} - set(aux) if "linear" in names else set()
    if absent:
        raise ValueError(f"{len(absent)} of {shape[0]} experts are absent")


class SortedExperts:
    """Tokens sorted by expert, then one product for each expert that has any: the plain way, on any device.

    Each expert's weight is a weight of the `linear` op. How many tokens an expert has is read on the host, so this
    cannot be captured in a CUDA graph.
    """

    def prepare(self, weights: Iterable[Tensor], count: int, linear_layout: str | None) -> PreparedExperts:
        parts = [prepare_linear(weight, forced=linear_layout) for weight in weights]
        first = parts[0]
        aux = {str(expert): part.data for expert, part in enumerate(parts) if expert}
        aux.update({f"{e}.{name}": tensor for e, part in enumerate(parts) for name, tensor in part.aux.items()})
        shape = (count, first.out_features, first.in_features)
        return PreparedExperts(first.data, f"sorted:{first.layout}", shape, first.dtype, aux)

    def apply(
        self,
        x: Tensor,
        weights: Tensor,
        ids: Tensor,
        first: PreparedExperts,
        second: PreparedExperts,
        activate: Callable[[Tensor], Tensor],
    ) -> Tensor:
        order = torch.argsort(ids.flatten(), stable=True)
        counts = torch.bincount(ids.flatten(), minlength=first.shape[0]).tolist()
        found = x.new_empty(ids.numel(), second.shape[1])
        start = 0
        for expert, size in enumerate(counts):
            if size:
                places = order[start : start + size]
                inner = activate(linear(x[places // ids.shape[1]], first.each[expert]))
                found[places] = linear(inner, second.each[expert])
            start += size
        return weighted_sum(found.view(*ids.shape, second.shape[1]), weights)


# Linear back ends that keep weights as they are: so do the experts that are computed without them.
_PLAIN = ("plain", "triton", "invariant")


class MaskedExperts:
    """Every expert sees every token, and a token's other experts count nothing: no step depends on what the router
    says, so this can be captured in a CUDA graph. Costs `experts / k` times the products of `SortedExperts`."""

    def prepare(self, weights: Iterable[Tensor], count: int, linear_layout: str | None) -> PreparedExperts:
        if linear_layout not in (None, *_PLAIN):
            raise ValueError(f"moe: 'masked' holds plain weights, but linear is told to use {linear_layout!r}")
        stacked: Tensor | None = None
        for place, weight in enumerate(weights):
            stacked = weight.new_empty(count, *weight.shape) if stacked is None else stacked
            stacked[place] = weight
        if stacked is None:
            raise ValueError("moe: there are no experts to prepare")
        return PreparedExperts(stacked, "masked", (count, stacked.shape[1], stacked.shape[2]), stacked.dtype)

    def apply(
        self,
        x: Tensor,
        weights: Tensor,
        ids: Tensor,
        first: PreparedExperts,
        second: PreparedExperts,
        activate: Callable[[Tensor], Tensor],
    ) -> Tensor:
        total = torch.zeros(x.shape[0], second.shape[1], dtype=weights.dtype, device=x.device)
        for expert in range(first.shape[0]):
            chosen = ids == expert
            share = torch.where(chosen, weights, 0).sum(-1, keepdim=True)
            out = F.linear(activate(F.linear(x, first.data[expert])), second.data[expert])
            # Not a product with 0: what an expert makes of tokens that are not its own may be infinite.
            total = total + torch.where(chosen.any(-1, keepdim=True), out * share, 0)
        return total.to(x.dtype)


def weighted_sum(found: Tensor, weights: Tensor) -> Tensor:
    """found `[T, k, H]`, weights `[T, k]` -> `[T, H]` of found's dtype, added up one by one in the weights' dtype."""
    total = found[:, 0] * weights[:, :1]
    for place in range(1, weights.shape[1]):
        total = total + found[:, place] * weights[:, place : place + 1]
    return total.to(found.dtype)


def _on_cuda(device: torch.device, dtype: torch.dtype) -> bool:
    return device.type == "cuda"


registry.register("moe", "sorted", SortedExperts())
registry.register("moe", "masked", MaskedExperts(), supports=_on_cuda, priority=5)
