"""How a logical tensor is cut over ranks and put together again, and by which rule. Integers and tensors only."""

from phalanx.layout.decide import decide
from phalanx.layout.decision import Decision
from phalanx.layout.heads import deal, kv_heads, query_heads
from phalanx.layout.partition import (
    Block,
    Heads,
    Partition,
    Piece,
    Sliceable,
    attention_blocks,
    copy_part,
    grouped_attention_blocks,
    local_shape,
    merge,
    pieces,
    shard,
    shard_into,
)
from phalanx.layout.rules import LayerSpec, PartitionConfig, RuleError
from phalanx.layout.weight import AttentionShape, Weight

__all__ = [
    "AttentionShape",
    "Block",
    "Decision",
    "Heads",
    "LayerSpec",
    "Partition",
    "PartitionConfig",
    "Piece",
    "RuleError",
    "Sliceable",
    "Weight",
    "attention_blocks",
    "copy_part",
    "deal",
    "decide",
    "grouped_attention_blocks",
    "kv_heads",
    "local_shape",
    "merge",
    "pieces",
    "query_heads",
    "shard",
    "shard_into",
]
