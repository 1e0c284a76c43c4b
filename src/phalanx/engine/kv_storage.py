"""KVStorage: the memory of the KV blocks, one allocation, seen by each layer as its own K and V cache."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from phalanx.models.kv_spec import KVGroup


def block_bytes(groups: Sequence[KVGroup], block_size: int) -> int:
    """Bytes of one block: enough for any group, since every block can serve any of them."""
    return max((group.bytes_per_token for group in groups), default=0) * block_size


class KVStorage:
    """``num_blocks`` blocks; inside one lie [layer of the group, K or V, token, kv head, head_dim].

    Args:
        groups: the layers that share block tables.
        num_blocks: the dummy block included.
        block_size: tokens of a block.
        device: where it lies.
    """

    def __init__(self, groups: Sequence[KVGroup], num_blocks: int, block_size: int, device: torch.device) -> None:
        self.groups = list(groups)
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.block_bytes = block_bytes(groups, block_size)
        # Not cleared: on the CPU, pages that were never written cost no memory, and unwritten slots are never read.
        self.memory = torch.empty(num_blocks * self.block_bytes, dtype=torch.uint8, device=device)

    def layers(self, num_layers: int) -> list[tuple[Tensor, Tensor]]:
        """K and V cache of every layer, views [num_blocks, block_size, kv heads, head_dim]."""
        found: list[tuple[Tensor, Tensor] | None] = [None] * num_layers
        for group in self.groups:
            spec = group.spec
            typed = self.memory.view(spec.dtype)
            size = (self.num_blocks, self.block_size, spec.num_kv_heads, spec.head_dim)
            token = spec.num_kv_heads * spec.head_dim
            strides = (self.block_bytes // spec.dtype.itemsize, token, spec.head_dim, 1)
            for place, layer in enumerate(group.layers):
                offset = place * 2 * token * self.block_size
                k = typed.as_strided(size, strides, offset)
                v = typed.as_strided(size, strides, offset + token * self.block_size)
                found[layer] = (k, v)
        return [pair for pair in found if pair is not None]
