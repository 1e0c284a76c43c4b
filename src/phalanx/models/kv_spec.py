"""What a layer keeps of every token, and how layers that keep the same share their blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch


@dataclass(frozen=True)
class KVCacheSpec:
    """Keys and values of one layer on one rank: ``[num_kv_heads, head_dim]`` of ``dtype`` a token, each.

    Attributes:
        window: tokens that a query sees, itself included; blocks that lie wholly before may be freed. None for all.
    """

    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    window: int | None = None

    @property
    def bytes_per_token(self) -> int:
        return 2 * self.num_kv_heads * self.head_dim * self.dtype.itemsize


@dataclass(frozen=True)
class KVGroup:
    """Layers that share a block table: a block holds ``block_size`` tokens of all of them."""

    spec: KVCacheSpec
    layers: tuple[int, ...]

    @property
    def bytes_per_token(self) -> int:
        return self.spec.bytes_per_token * len(self.layers)


def kv_groups(specs: Sequence[KVCacheSpec]) -> list[KVGroup]:
    """Layers of equal spec, in groups of at most as many layers as the rarest spec has.

    Groups of like size waste little where every block of the pool can serve any of them.
    """
    by_spec: dict[KVCacheSpec, list[int]] = {}
    for layer, spec in enumerate(specs):
        by_spec.setdefault(spec, []).append(layer)
    size = min(map(len, by_spec.values()), default=0)
    return [
        KVGroup(spec, tuple(layers[first : first + size]))
        for spec, layers in by_spec.items()
        for first in range(0, len(layers), size)
    ]


class SequenceState(Protocol):
    """What the KV hooks are told of a sequence."""

    @property
    def seen_tokens(self) -> int: ...

    @property
    def num_blocks(self) -> int: ...


class BlockSource(Protocol):
    """What ``maybe_allocate_kv`` takes blocks from."""

    @property
    def free_blocks(self) -> int: ...

    def extend(self, sequence: Any, num_blocks: int) -> None: ...
