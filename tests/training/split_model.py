"""A small model cut by hand, with a parameter of each kind: cut, replicated, partial, and partly copied."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from phalanx.distributed.group import Group, SoloGroup
from phalanx.layout import Block, Partition, shard
from phalanx.parallel.regions import copy_in, sum_out
from phalanx.parallel.registry import LayoutRegistry, ParameterLayout

QUERY, SHARED, HEAD = 16, 4, 4
# The query rows are cut, the shared rows copied to all ranks.
FUSED = Partition.column([Block(QUERY), Block(SHARED, copied=True)])
LAYOUTS = {
    "fused": ParameterLayout("fused", (QUERY + SHARED, 6), FUSED),
    # Acts on each rank's heads, so a rank computes only a part of its gradient.
    "gain": ParameterLayout("gain", (HEAD,), Partition.replicate(), partial=True),
    "out": ParameterLayout("out", (3, QUERY), Partition.row()),
    "bias": ParameterLayout("bias", (3,), Partition.replicate()),
}


class SplitModel(nn.Module):
    """x [batch, 6] -> [batch, 3]; `group`: the ranks that it is cut over."""

    def __init__(self, group: Group | None = None, seed: int = 0) -> None:
        super().__init__()
        self.group = group or SoloGroup()
        torch.manual_seed(seed)
        for name, layout in LAYOUTS.items():
            whole = torch.randn(layout.shape)
            setattr(self, name, nn.Parameter(shard(whole, layout.partition, self.group.rank, self.group.size).clone()))
        self.registry = LayoutRegistry(LAYOUTS, self.group.rank, self.group.size)

    def forward(self, x: Tensor) -> Tensor:
        x = copy_in(x, self.group)
        own = QUERY // self.group.size
        query = torch.tanh(x @ self.fused[:own].T).unflatten(-1, (-1, HEAD))
        shared = x @ copy_in(self.fused[own:], self.group).T
        hidden = (query * shared[:, None] * self.gain).flatten(1)
        return sum_out(hidden @ self.out.T, self.group) + self.bias
