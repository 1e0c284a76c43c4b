"""How a model would be cut over ranks, parameter by parameter, told from its shapes alone.

The model is on the meta device and goes through the same rules and the same cut as one that is trained; nothing is
computed here a second time.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from math import prod
from typing import Any, Literal

import torch
from torch import nn

from phalanx.distributed.absent import AbsentRank
from phalanx.layout import Partition, local_shape, pieces
from phalanx.layout.decision import Decision
from phalanx.layout.roles import Role, Skeleton, generic, in_attention
from phalanx.layout.rules import PartitionConfig
from phalanx.layout.weight import Weight
from phalanx.parallel.inventory import inventory, model_type, tied_names
from phalanx.parallel.parallelize import cut_model, decisions_for
from phalanx.parallel.registry import LayoutRegistry, ParameterLayout

Part = Literal["attention", "MLP", "experts", "embedding", "norms", "other"]
PARTS: tuple[Part, ...] = ("attention", "MLP", "experts", "embedding", "norms", "other")
"""Where parameters act; "embedding" is the output head as well, "experts" their router too."""

_WHOLE: Mapping[Role, str] = {
    "router": "router: each rank chooses among all experts",
    "latent": "a latent that the heads of all ranks read",
}


@dataclass(frozen=True)
class GroupPlan:
    """Parameters at the same place of several layers, which are cut alike.

    name            with the numbers of their layers in braces: `model.layers.{0..79}.mlp.up_proj.weight`.
    also            the further names of tied parameters, written in the same way.
    count, shape    how many they are, and the whole shape of each.
    style           "column", "row", "vocab", "experts", "copied" (every rank has all of it), "whole" (with one rank).
    local_shapes    of each rank's part of one of them.
    copies          for each rank, how many elements of one of them other ranks hold too.
    why_copied      why there are such elements; empty if there are none.
    partial         each rank computes a part of the gradient; they are summed.
    source          the rule that decided; `hand_written` if the user wrote it.
    """

    name: str
    also: tuple[str, ...]
    count: int
    shape: tuple[int, ...]
    part: Part
    style: str
    partition: Partition
    local_shapes: tuple[tuple[int, ...], ...]
    copies: tuple[int, ...]
    why_copied: str
    partial: bool
    source: str
    hand_written: bool

    @property
    def parameters(self) -> int:
        """Elements of all of them, each counted once."""
        return self.count * prod(self.shape)

    def held(self, rank: int) -> int:
        """Elements that a rank holds of all of them."""
        return self.count * prod(self.local_shapes[rank])

    def held_elsewhere_too(self, rank: int) -> int:
        """Those of `held` that other ranks hold as well."""
        return self.count * self.copies[rank]


@dataclass(frozen=True)
class ModelPlan:
    """How a model would lie over the ranks. `registry` is that of rank 0, with every parameter by its own name."""

    model_type: str | None
    tp_size: int
    groups: tuple[GroupPlan, ...]
    registry: LayoutRegistry

    @property
    def parameters(self) -> int:
        """Elements of the model; a tied parameter counts once."""
        return sum(group.parameters for group in self.groups)

    @property
    def copied(self) -> int:
        """Elements that the ranks hold together beyond one copy of each."""
        return sum(self.held(rank) for rank in range(self.tp_size)) - self.parameters

    @property
    def copied_share(self) -> float:
        """`copied` as a share of all that the ranks hold."""
        return self.copied / (self.copied + self.parameters)

    @property
    def hand_written(self) -> bool:
        """Whether the user's own rules decided anything."""
        return any(group.hand_written for group in self.groups)

    def held(self, rank: int) -> int:
        """Elements that a rank holds."""
        return sum(group.held(rank) for group in self.groups)

    def held_of(self, name: str, rank: int) -> int:
        """Elements that a rank holds of one parameter."""
        layout = self.registry[name]
        return prod(_local_shapes(layout.partition, layout.shape, self.tp_size)[rank])


def hollow_model(config: Any) -> Any:
    """The causal LM of a transformers config with its parameters on the meta device.

    Raises ValueError if transformers has none for it.
    """
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config)
    except ValueError as error:
        if "Unrecognized configuration class" not in str(error):
            raise
        raise ValueError(f"transformers has no causal language model of type {config.model_type!r}") from None


def plan_model(
    model: nn.Module,
    tp_size: int,
    *,
    config: PartitionConfig | Mapping[str, Any] | None = None,
    preset: str | None = None,
    sequence_parallel: bool = False,
) -> ModelPlan:
    """What `parallelize` would do to a model on the meta device over `tp_size` ranks. The model is cut by it.

    Raises:
        RuleError: rules that do not fit the model, all of their faults at once.
        ValueError: what cannot be cut, or parameters that have values.
    """
    if not all(parameter.is_meta for parameter in model.parameters()):
        raise ValueError("a plan is made of a model on the meta device: build it under torch.device('meta')")
    if config is not None and not isinstance(config, PartitionConfig):
        config = PartitionConfig.from_dict(config)
    known = _Known(model, decisions_for(model, tp_size, config=config, preset=preset), config)
    registry = LayoutRegistry.whole(model)
    if tp_size > 1:
        registry = cut_model(
            model,
            AbsentRank(0, tp_size),
            known.decisions,
            sequence_parallel=sequence_parallel,
            sum_gradients=False,
        )
    return ModelPlan(model_type(model), tp_size, tuple(_groups(known, registry)), registry)


class _Known:
    """What is known of a model's parameters before it is cut."""

    def __init__(
        self, model: nn.Module, decisions: Mapping[str, Decision], config: PartitionConfig | None = None
    ) -> None:
        tied = tied_names(model)
        skeleton = Skeleton(inventory(model), tied, () if config is None else config.lm_head_patterns)
        self.decisions = decisions
        self.weights: Mapping[str, Weight] = skeleton.weights
        self.roles = skeleton.roles
        self.further_names: dict[str, list[str]] = {}
        for alias, name in tied.items():
            self.further_names.setdefault(name, []).append(alias)

    def weight_of(self, name: str) -> str:
        """The weight that a parameter is, or whose bias it is."""
        return name if name in self.weights else f"{name.rpartition('.')[0]}.weight"

    def part(self, name: str) -> Part:
        weight = self.weights.get(self.weight_of(name))
        if weight is None:
            return "other"
        role = self.roles[weight.name]
        if weight.kind == "norm" or role == "head_norm":
            return "norms"
        if role in ("tokens", "head") or weight.kind == "embedding":
            return "embedding"
        if in_attention(weight):
            return "attention"
        if weight.kind == "experts" or role == "router" or ".experts." in name:
            return "experts"
        return "MLP" if role in ("up", "gate_up", "down") else "other"

    def why_copied(self, layout: ParameterLayout, tp_size: int) -> str:
        """Why ranks hold the same elements of a parameter of which they do."""
        if layout.partition.kind != "replicate":
            heads = next((block.heads for block in layout.partition.blocks if block.heads is not None), None)
            if heads is None:
                return "a part that every rank needs"
            return f"{heads.num_kv_heads} KV head{'s' * (heads.num_kv_heads > 1)} for {tp_size} ranks"
        weight = self.weights.get(self.weight_of(layout.name))
        decision = self.decisions.get(self.weight_of(layout.name))
        if decision is None or weight is None:
            return "no rule names it"
        if decision.style == "row":
            return "bias of a row layer: added once, after the sum"
        if weight.kind == "norm" or self.roles[weight.name] == "head_norm":
            return "norm"
        if decision.hand_written:
            return "the rules say so"
        if decision.source == "no rule":
            return "no rule names it"
        told = decision.source.removeprefix("structure: replicated").lstrip(", ")
        if told and told != decision.source:
            return told
        return _WHOLE.get(self.roles[weight.name], "no projection, embedding or head")


def _groups(known: _Known, registry: LayoutRegistry) -> Iterable[GroupPlan]:
    world = registry.tp_size
    alike: dict[tuple[Any, ...], list[str]] = {}
    for name, layout in registry.items():
        decision = known.decisions.get(known.weight_of(name))
        shared = sum(_shared(layout.partition, layout.shape, world))
        key = (
            generic(name),
            tuple(generic(alias) for alias in known.further_names.get(name, ())),
            layout.shape,
            layout.partition,
            layout.partial,
            known.why_copied(layout, world) if shared and world > 1 else "",
            "" if decision is None else decision.source,
            decision is not None and decision.hand_written,
            _style(layout, decision, world),
        )
        alike.setdefault(key, []).append(name)
    for (*_, why, source, hand_written, style), names in alike.items():
        for numbered in _in_braces(names):
            first = numbered.names[0]
            layout = registry[first]
            aliases = [alias for each in numbered.names for alias in known.further_names.get(each, ())]
            yield GroupPlan(
                name=numbered.text,
                also=tuple(each.text for each in _in_braces(aliases)),
                count=len(numbered.names),
                shape=layout.shape,
                part=known.part(first),
                style=style,
                partition=layout.partition,
                local_shapes=_local_shapes(layout.partition, layout.shape, world),
                copies=_shared(layout.partition, layout.shape, world),
                why_copied=why,
                partial=layout.partial,
                source=source,
                hand_written=hand_written,
            )


def _style(layout: ParameterLayout, decision: Decision | None, world: int) -> str:
    if world == 1:
        return "whole"
    return "copied" if decision is None or layout.partition.kind == "replicate" else decision.style


@cache
def _local_shapes(partition: Partition, shape: tuple[int, ...], world: int) -> tuple[tuple[int, ...], ...]:
    return tuple(local_shape(partition, shape, rank, world) for rank in range(world))


@cache
def _shared(partition: Partition, shape: tuple[int, ...], world: int) -> tuple[int, ...]:
    """For each rank, its elements that are on other ranks too."""
    return tuple(
        sum(
            prod(part.stop - part.start for part in piece.local_slices)
            for piece in pieces(partition, shape, rank, world)
            if piece.copies > 1
        )
        for rank in range(world)
    )


@dataclass(frozen=True)
class _Numbered:
    text: str
    names: tuple[str, ...]


def _in_braces(names: Sequence[str]) -> list[_Numbered]:
    """Names that differ in their numbers only, put together as far as every combination of the numbers is there."""
    if not names:
        return []
    by_numbers = {tuple(int(each) for each in _NUMBER.findall(name)): name for name in names}
    found = []
    between = _NUMBER.split(names[0])
    for spans in _products(list(by_numbers)):
        texts = [*map(_span, spans), ""]
        text = "".join(each for pair in zip(between, texts, strict=True) for each in pair)
        found.append(_Numbered(text, tuple(by_numbers[numbers] for numbers in product(*spans))))
    return found


_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


def _products(numbers: Sequence[tuple[int, ...]]) -> list[tuple[tuple[int, ...], ...]]:
    """The tuples as products of sets: [(0, 1), (0, 2), (3, 1), (3, 2)] -> [((0, 3), (1, 2))]."""
    if not numbers[0]:
        return [()]
    rest: dict[int, list[tuple[int, ...]]] = {}
    for first, *others in numbers:
        rest.setdefault(first, []).append(tuple(others))
    firsts: dict[tuple[tuple[int, ...], ...], list[int]] = {}
    for first, tails in rest.items():
        firsts.setdefault(tuple(sorted(tails)), []).append(first)
    return [(tuple(sorted(heads)), *tail) for tails, heads in firsts.items() for tail in _products(tails)]


def _span(numbers: Sequence[int]) -> str:
    """Sorted numbers for people: {0..3,8}; one stands alone."""
    if len(numbers) == 1:
        return str(numbers[0])
    starts = [n for n in numbers if n - 1 not in numbers]
    ends = [n for n in numbers if n + 1 not in numbers]
    return f"{{{','.join(str(a) if a == b else f'{a}..{b}' for a, b in zip(starts, ends, strict=True))}}}"
