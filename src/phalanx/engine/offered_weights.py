"""What ranks that bring weights say of them beforehand, and errors of one rank that are errors of all.

An update that failed on one rank only would leave the others waiting in a collective, with some weights old and some
new. So everybody looks first, and nobody begins before all have found that it fits.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple
from zlib import crc32

import torch
from torch import Tensor

from phalanx.distributed.group import Group
from phalanx.layout.partition import Partition

Weights = Mapping[str, tuple[Partition, Tensor]]
"""Name of a checkpoint tensor -> how it is cut over the source group, and this rank's shard. A mapping whose lookups
are dear, or are made by all ranks together, has a method ``fact(name)`` that says what a lookup would give, as a tuple
(partition, shape, dtype): then an update looks each up once, in the mapping's order, on all ranks."""


class Fact(NamedTuple):
    """How a tensor is cut, and this rank's shard without its values."""

    partition: Partition
    shape: tuple[int, ...]
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}, cut by {self.partition.kind}"


def facts_of(weights: Weights) -> dict[str, Fact]:
    """What each lookup will give."""
    tell = getattr(weights, "fact", None)
    if tell is not None:
        return {name: Fact(*tell(name)) for name in weights}
    found = {}
    for name in weights:
        partition, shard = weights[name]
        found[name] = Fact(partition, tuple(shard.shape), shard.dtype)
    return found


def shapes_on_all(facts: Mapping[str, Fact], group: Group, device: torch.device) -> dict[str, list[tuple[int, ...]]]:
    """The shape of every rank's shard of each tensor, told to all ranks of `group`.

    Raises:
        ValueError: names, cuts or dtypes that are not the same on all ranks; the same error on all.
    """
    mine = [
        (name, [fact.shape, str(fact.dtype), fact.partition.kind, crc32(json.dumps(fact.partition.to_json()).encode())])
        for name, fact in facts.items()
    ]
    first, *others = said = told(group, mine, device)
    for rank, other in enumerate(others, 1):
        names = [name for name, _ in first], [name for name, _ in other]
        if names[0] != names[1]:
            lacking = sorted(set(names[0]) ^ set(names[1]))
            raise ValueError(
                f"ranks 0 and {rank} give different tensors, or in another order"
                + (f": only one of them has {', '.join(lacking[:5])}" if lacking else "")
            )
        for (name, (_, *here)), (_, (_, *there)) in zip(first, other, strict=True):
            if here != there:
                raise ValueError(
                    f"{name} is {here[0]}, cut by {here[1]}, on rank 0, and {there[0]}, cut by {there[1]}, on rank "
                    f"{rank}: give all ranks one dtype and one partition of a tensor"
                )
    return {name: [tuple(each[place][1][0]) for each in said] for place, name in enumerate(facts)}


class Alike:
    """``with Alike(groups, device):`` what is raised within, on any rank of any of the groups, is raised on all.

    A rank without that error raises ValueError with its text, and with the rank that had it.

    Args:
        groups: what a group's ranks are called -> the group; asked one after the other, on all ranks in this order.
    """

    def __init__(self, groups: Mapping[str, Group], device: torch.device) -> None:
        self._groups = groups
        self._device = device

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is not None and not isinstance(error, Exception):
            return
        own = text = None if error is None else str(error)
        for name, group in self._groups.items():
            failed = torch.tensor([int(text is not None)], device=self._device)
            if not int(group.all_reduce(failed, "max")):
                continue
            texts = told(group, text, self._device)
            if any(each != text for each in texts):
                rank = next(rank for rank, each in enumerate(texts) if each is not None)
                text = f"rank {rank} of the {group.size} {name}: {texts[rank]}"
        if text != own:
            raise ValueError(text) from error


def told(group: Group, value: Any, device: torch.device) -> Sequence[Any]:
    """Every rank's value, of JSON."""
    if group.size == 1:
        return [json.loads(json.dumps(value))]
    mine = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(device)
    counts = group.all_gather(torch.tensor([mine.numel()], device=device)).tolist()
    return [json.loads(bytes(part.tolist())) for part in group.all_gather(mine, 0, counts).split(counts)]
