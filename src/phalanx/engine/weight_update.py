"""New weights for a model that is served, from ranks that train it: in memory, a tensor at a time, no rank holding all.

The ranks of a *source group* hold each tensor cut by a `Partition`; every one of them also serves, as a rank of its own
engine. The checkpoint's way into the model is gone once with a source that only notes what is read; the ranks tell each
other. From then on everybody knows which boxes travel from whom to whom, and those that lie where they are needed do
not travel. What arrives goes the checkpoint's way again (cut, fused, quantised), into the place of the old parameter.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from phalanx.distributed.group import Group
from phalanx.engine.offered_weights import Alike, Fact, Weights, facts_of, shapes_on_all, told
from phalanx.layout.boxes import Box, meeting, relative, sizes, without
from phalanx.layout.partition import Partition, local_shape, pieces
from phalanx.models.base import TransformerModel
from phalanx.models.container import LayerContainer
from phalanx.models.parameter import InferenceParameter
from phalanx.models.policy import POLICIES, policy_for
from phalanx.parallel.loading import spellings
from phalanx.weights.source import TensorInfo, WeightSource


class _Announced(WeightSource):
    """Tensors whose shapes and dtypes are known beforehand."""

    def __init__(self, infos: Mapping[str, TensorInfo]) -> None:
        self._infos = infos

    def names(self) -> Sequence[str]:
        return list(self._infos)

    def info(self, name: str) -> TensorInfo:
        return self._infos[name]


class Noted(_Announced):
    """A source of zeros that notes what is read of it.

    Attributes:
        boxes: of each tensor, every box once.
        reads: how often each tensor is read.
    """

    def __init__(self, infos: Mapping[str, TensorInfo]) -> None:
        super().__init__(infos)
        self.boxes: dict[str, list[Box]] = {name: [] for name in infos}
        self.reads = dict.fromkeys(infos, 0)

    def read(self, name: str, index: tuple[slice, ...] | None = None) -> Tensor:
        info = self._infos[name]
        box = _full(index, info.shape)
        values = torch.zeros(sizes(box), dtype=info.dtype)
        self.reads[name] += 1
        if box not in self.boxes[name] and values.numel():
            self.boxes[name].append(box)
        return values


class Arrived(_Announced):
    """What is here of each tensor, as boxes of it. A tensor goes when it was read as often as ``reads`` says."""

    def __init__(self, infos: Mapping[str, TensorInfo], reads: Mapping[str, int]) -> None:
        super().__init__(infos)
        self._left = dict(reads)
        self._held: dict[str, list[tuple[Box, Tensor]]] = {}

    def hold(self, name: str, boxes: list[tuple[Box, Tensor]]) -> None:
        """What has come of a tensor."""
        if self._left[name]:
            self._held[name] = boxes

    def read(self, name: str, index: tuple[slice, ...] | None = None) -> Tensor:
        info = self._infos[name]
        box, held = _full(index, info.shape), self._held[name]
        self._left[name] -= 1
        if not self._left[name]:
            del self._held[name]
        for there, values in held:
            if meeting(there, box) == box:
                return values[relative(box, there)]
        out = torch.empty(sizes(box), dtype=info.dtype, device=held[0][1].device if held else "cpu")
        for there, values in held:
            met = meeting(there, box)
            if met is not None:
                out[relative(met, box)] = values[relative(met, there)]
        return out


@dataclass(frozen=True)
class Plan:
    """What the ranks of a source group give each other; all of them have the same.

    Attributes:
        partitions, locals: how each tensor is cut, and the shapes of all ranks' shards.
        infos: whole shape and dtype of each tensor.
        gives: for each tensor and rank, the boxes that others need of it, in the order in which they travel.
        reads: how often the model of this rank reads each tensor.
    """

    partitions: dict[str, Partition]
    locals: dict[str, list[tuple[int, ...]]]
    infos: dict[str, TensorInfo]
    gives: dict[str, list[list[Box]]]
    reads: dict[str, int]


class WeightUpdate:
    """Updates one model, and keeps its plan for the next update.

    Args:
        model: serves on this rank.
        policy_name: of the policy that built it.
        served: the ranks that serve the model together.
    """

    def __init__(self, model: TransformerModel, policy_name: str, served: Group) -> None:
        self.model = model
        self._policy = next((p for p in POLICIES.values() if p.__name__ == policy_name), policy_for(model.config))
        self._served = served
        self._plan: Plan | None = None

    def __call__(self, weights: Weights, group: Group, *, busy: bool = False) -> None:
        """Brings the weights in; called at the same time by all ranks of the source group and of the model.

        Args:
            busy: whether this rank computes with the old weights still.

        Raises, on all of these ranks, and before anything is changed:
            RuntimeError: a rank is busy.
            WeightError: tensors that the model does not know or lacks.
            ValueError: one that is cut, shaped or stored otherwise than on other ranks or than in the first update; on
                a rank where nothing is wrong, what is wrong on another.
        """
        with self._alike(group):
            if busy:
                raise RuntimeError("update_weights while requests run or wait: finish or abort them first")
            facts = facts_of(weights)
            if self._plan is None and not facts:
                raise ValueError("an update without tensors: give those of the whole model")
            if self._plan is not None:
                _check_as_planned(self._plan, facts, group)
        plan = self._plan = self._plan or self._planned(facts, group)
        arrived = Arrived(plan.infos, plan.reads)
        for old, name, fresh in self._fed(arrived, self._brought(weights, arrived, plan, group)):
            put(old, name, fresh, in_place=self.model.device.type != "cpu")
        if self.model.device.type == "cuda":
            # A product reads its first weights before the kernels ahead of it have ended.
            torch.cuda.synchronize(self.model.device)

    def _alike(self, group: Group) -> Alike:
        return Alike({"that give the weights": group, "of the engine": self._served}, self.model.device)

    def _planned(self, facts: Mapping[str, Fact], group: Group) -> Plan:
        device = self.model.device
        with self._alike(group):
            shapes = shapes_on_all(facts, group, device)
            infos = {
                name: TensorInfo(whole_shape(name, fact.partition, shapes[name], group.size), fact.dtype)
                for name, fact in facts.items()
            }
            noted = Noted(infos)
            for _ in self._fed(noted, iter(infos)):
                pass
        needs = [
            {name: [_box(*sides) for sides in boxes] for name, boxes in each.items()}
            for each in told(group, {name: _sides(boxes) for name, boxes in noted.boxes.items()}, device)
        ]
        partitions = {name: fact.partition for name, fact in facts.items()}
        gives = {
            name: given_boxes(partitions[name], info.shape, [each[name] for each in needs])
            for name, info in infos.items()
        }
        return Plan(partitions, shapes, infos, gives, noted.reads)

    def _fed(
        self, source: WeightSource, names: Iterator[str]
    ) -> Iterator[tuple[LayerContainer, str, InferenceParameter]]:
        """Feeds a source the checkpoint's way; gives each parameter that gets ready, with the container of the old."""
        policy = self._policy(self.model.config, source=source)
        policy.model = self.model
        containers = policy.build_container_map()
        # Modules may call a tensor otherwise than checkpoints do.
        known = {name: next(filter(containers.knows, spellings(name)), name) for name in source.names()}
        containers.begin({known[name]: source.info(name).shape for name in known})
        fresh = [*containers.transformer_params, containers.non_transformer_params]
        pairs = [(new, old) for new, old in zip(fresh, [*self.model.layers, self.model.outer], strict=True) if new]
        for name in names:
            with torch.inference_mode():
                containers.map_param(known[name], source.tensor(name))
                for new, old in pairs:
                    for parameter, value in new.take_finalized().items():
                        yield old, parameter, value
        containers.validate()

    def _brought(self, weights: Weights, arrived: Arrived, plan: Plan, group: Group) -> Iterator[str]:
        """Has every tensor come, one after the other, and says its name when it is there."""
        for name in plan.infos:
            partition, shard = weights[name]
            shape, gives = plan.infos[name].shape, plan.gives[name]
            own = pieces(partition, shape, group.rank, group.size)
            here = [(piece.global_slices, shard.detach()[piece.local_slices]) for piece in own]
            counts = [sum(prod(sizes(box)) for box in boxes) for boxes in gives]
            if any(counts):
                outgoing = [_cut_out(here, box).reshape(-1) for box in gives[group.rank]]
                flat = torch.cat(outgoing) if outgoing else shard.new_empty(0)
                come = group.all_gather(flat, 0, counts).split(counts)
                for rank, (boxes, values) in enumerate(zip(gives, come, strict=True)):
                    if rank != group.rank and boxes:
                        parts = values.split([prod(sizes(box)) for box in boxes])
                        here += [(box, part.view(sizes(box))) for box, part in zip(boxes, parts, strict=True)]
            arrived.hold(name, here)
            yield name


def _check_as_planned(plan: Plan, facts: Mapping[str, Fact], group: Group) -> None:
    """Raises ValueError for weights that are not like those of the first update."""
    size = len(next(iter(plan.locals.values())))
    if list(facts) != list(plan.infos) or group.size != size:
        raise ValueError(
            f"an update has the {len(plan.infos)} names, their order and the {size} ranks of the first update: given "
            f"{len(facts)} names over {group.size} ranks here"
        )
    for name, fact in facts.items():
        known = Fact(plan.partitions[name], plan.locals[name][group.rank], plan.infos[name].dtype)
        if fact != known:
            raise ValueError(
                f"{name} is {fact}; in the first update it was {known}: make another engine for another layout"
            )


def put(container: LayerContainer, name: str, fresh: InferenceParameter, *, in_place: bool) -> None:
    """The new parameter in the place of the old one; `in_place` keeps the old one's memory, which graphs refer to."""
    old: InferenceParameter | None = getattr(container, name)
    if old is None or not in_place:
        setattr(container, name, fresh)
        return
    if old.data.shape != fresh.data.shape or old.aux.keys() != fresh.aux.keys():
        raise ValueError(f"{type(container).__name__}.{name}: {fresh.shape} does not fit into {old.shape}")
    old.data.copy_(fresh.data)
    for key, tensor in old.aux.items():
        tensor.copy_(fresh.aux[key])


def whole_shape(name: str, partition: Partition, shards: Sequence[tuple[int, ...]], world: int) -> tuple[int, ...]:
    """The shape of a tensor of which the ranks hold shards of these shapes.

    Raises:
        ValueError: the partition does not cut any tensor into them.
    """
    shape = shards[0]
    if partition.kind != "replicate":
        dim = partition.dim % len(shape)
        blocks = sum(block.size for block in partition.blocks)
        size = prod(partition.view) if partition.view else blocks or sum(each[dim] for each in shards)
        shape = (*shape[:dim], size, *shape[dim + 1 :])
    expected = [local_shape(partition, shape, rank, world) for rank in range(world)]
    if expected != list(shards):
        raise ValueError(
            f"{name}: shards of {list(shards)} are no {partition.kind} cut of {shape}, which are {expected}"
        )
    return shape


def given_boxes(partition: Partition, shape: Sequence[int], needs: Sequence[Sequence[Box]]) -> list[list[Box]]:
    """For each rank, the boxes that it gives to those that need them (``needs``, by rank) and do not hold them."""
    world = len(needs)
    held = [[piece.global_slices for piece in pieces(partition, shape, rank, world)] for rank in range(world)]
    gives: list[list[Box]] = [[] for _ in range(world)]
    for rank, boxes in enumerate(needs):
        left = list(boxes)
        for giver in [rank, *(other for other in range(world) if other != rank)]:
            rest: list[Box] = []
            while left:
                box = left.pop()
                met = next((met for piece in held[giver] if (met := meeting(piece, box)) is not None), None)
                if met is None:
                    rest.append(box)
                    continue
                if giver != rank and met not in gives[giver]:
                    gives[giver].append(met)
                left += without(box, met)
            left = rest
    return gives


def _cut_out(here: Iterable[tuple[Box, Tensor]], box: Box) -> Tensor:
    for there, values in here:
        if meeting(there, box) == box:
            return values[relative(box, there)]
    raise ValueError(f"box {box} is not held here")


def _sides(boxes: Iterable[Box]) -> list[list[list[int]]]:
    return [[[side.start for side in box], [side.stop for side in box]] for box in boxes]


def _box(starts: Sequence[int], stops: Sequence[int]) -> Box:
    return tuple(map(slice, starts, stops))


def _full(index: tuple[slice, ...] | None, shape: Sequence[int]) -> Box:
    """A box with bounds for every dimension."""
    given = (*(index or ()), *(slice(None),) * (len(shape) - len(index or ())))
    return tuple(slice(*side.indices(size)[:2]) for side, size in zip(given, shape, strict=True))
