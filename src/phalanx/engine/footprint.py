"""What a model takes on each rank, worked out from headers: its parameters run through the model kit without values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from phalanx.config import EngineConfig
from phalanx.distributed.group import Group
from phalanx.engine.kv_storage import block_bytes
from phalanx.models.base import TransformerModel
from phalanx.models.hf_config import HFConfig
from phalanx.models.policy import policy_for
from phalanx.weights import WeightSource
from phalanx.weights.source import TensorInfo


@dataclass(frozen=True)
class RankFootprint:
    """What one rank holds.

    Attributes:
        query_heads, kv_heads: of each layer; a KV head may be copied to several ranks.
        parameters, parameter_bytes: numbers and bytes, without what a device's layout pads; a tied head counts once.
        kv_bytes_per_token: keys and values of a token in all layers.
        kv_block_bytes: of one block of the pool; a token of a model whose layers differ needs a block a KV group.
    """

    rank: int
    query_heads: int
    kv_heads: int
    parameters: int
    parameter_bytes: int
    kv_bytes_per_token: int
    kv_block_bytes: int


class ShapesOnly(WeightSource):
    """The tensors of another source without their values: reading gives tensors on the meta device."""

    def __init__(self, source: WeightSource) -> None:
        self._source = source

    def names(self) -> Sequence[str]:
        return self._source.names()

    def info(self, name: str) -> TensorInfo:
        return self._source.info(name)

    def read(self, name: str, index: tuple[slice, ...] | None = None) -> Tensor:
        shape, dtype = self.info(name)
        whole = torch.empty(shape, dtype=dtype, device="meta")
        return whole if index is None else whole[index]


def hollow_model(config: HFConfig, source: WeightSource, engine_config: EngineConfig, group: Group) -> TransformerModel:
    """The model of one rank with parameters on the meta device.

    Raises:
        ModelConfigError, WeightError: what loading would raise, values aside.
    """
    policy = policy_for(config)(config, source=ShapesOnly(source))
    # Layouts of weights are the device's own; padding aside they take as much as the plain one.
    ops = {op: name for op, name in engine_config.ops.items() if op != "linear"}
    policy.model = policy.instantiate_model(engine_config.model_copy(update={"device": "cpu", "ops": ops}), group)
    policy.model.device = policy.model.placement.device = torch.device("meta")
    policy.populate_model_parameters()
    return policy.model


def rank_footprint(model: TransformerModel) -> RankFootprint:
    """What the rank that a model was built for holds."""
    held = model.held_parameters()
    query_heads, kv_heads = model.local_heads
    return RankFootprint(
        rank=model.group.rank,
        query_heads=query_heads,
        kv_heads=kv_heads,
        parameters=sum(count for count, _ in held),
        parameter_bytes=sum(size for _, size in held),
        kv_bytes_per_token=sum(group.bytes_per_token for group in model.kv_groups),
        kv_block_bytes=block_bytes(model.kv_groups, model.engine_config.block_size),
    )


def blocks_of(model: TransformerModel, num_tokens: int) -> int:
    """Blocks that a sequence of this many tokens holds, over all KV groups; a window lets go what lies before it."""
    size = model.engine_config.block_size
    held = 0
    for group in model.kv_groups:
        # A window that ends inside a block reaches into one more.
        most = num_tokens if group.spec.window is None else min(num_tokens, group.spec.window + size)
        held += -(-most // size)
    return held
