"""How model families lay out a fused projection, and the cut that follows from it.

A fused QKV projection is stored in one of two orders (both computed by `phalanx.layout.partition`):

    stacked   [all Q; all K; all V]
    grouped   for each KV head: [its query heads; k; v]. With as many KV heads as query heads this is the head-major
              order [q_h, k_h, v_h], with one KV head it is stacked [Q; k; v].

Cutting one as the other raises nothing and computes another function, so a layout is never guessed from a shape alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from phalanx.layout import heads
from phalanx.layout.partition import Block, Heads, Partition, attention_blocks, grouped_attention_blocks
from phalanx.layout.roles import Role, role
from phalanx.layout.weight import AttentionShape, Weight

Order = Literal["stacked", "grouped"]

# Read from the forward of each family.
QKV_ORDERS: Mapping[str, Order] = {
    **dict.fromkeys(("gpt_neox", "gpt_neox_japanese", "bloom", "persimmon"), "grouped"),
    **dict.fromkeys(("falcon", "gpt_bigcode", "internlm2"), "grouped"),
    **dict.fromkeys(("gpt2", "phi3", "phi4_multimodal", "mpt", "dbrx", "chatglm", "baichuan"), "stacked"),
}
# Projections that hold gate and up, [gate; up], under a name that elsewhere is a plain projection.
GATED: Mapping[str, tuple[str, ...]] = {"chatglm": ("mlp.dense_h_to_4h",)}
REFUSED: Mapping[str, str] = {
    "codegen": "its QKV projection interleaves heads in four blocks of [q, v, k]",
    "yuan": "its attention mixes neighbouring tokens by convolutions over all heads",
    "gpt_oss": "its experts are stored transposed with gate and up interleaved, and its attention has a sink per head",
    "qwen": "its MLP names projections in the opposite way of others; convert the model to qwen2",
}


def is_gated(weight: Weight, family: str | None) -> bool:
    """Whether the output features of an MLP projection are [gate; up]."""
    return role(weight) == "gate_up" or any(
        weight.name.removesuffix(".weight").endswith(f".{name}") for name in GATED.get(family or "", ())
    )


def query_heads_cut(size: int, shape: AttentionShape) -> Block:
    """The block of `size` elements that are laid out by query heads: of Q, of the input of the output projection.

    The elements a head follow from the size, since a projection may hold more than the query (a gate beside it).
    """
    return _by_heads("query", size, shape.num_heads, shape)


def kv_heads_cut(size: int, shape: AttentionShape) -> Block:
    """The block of `size` elements that are laid out by KV heads."""
    return _by_heads("kv", size, shape.num_kv_heads, shape)


def qkv_cut(weight: Weight, order: Order) -> Partition:
    """The column cut of a fused QKV weight. Raises ValueError if it does not hold Q, K and V of its heads."""
    shape = weight.attention
    if shape is None:
        raise ValueError("the heads of its attention are not known")
    q, k, v = (
        shape.num_heads * shape.head_dim,
        shape.num_kv_heads * shape.head_dim,
        shape.num_kv_heads * shape.value_dim,
    )
    if q + k + v != weight.out_features:
        raise ValueError(
            f"it has {weight.out_features} output features, but {shape.num_heads} query and {shape.num_kv_heads} KV "
            f"heads of {shape.head_dim} make {q} + {k} + {v} = {q + k + v}: the layout is not Q, K and V of these heads"
        )
    blocks: tuple[Block, ...]
    if order == "stacked":
        blocks = attention_blocks(shape.num_heads, shape.num_kv_heads, shape.head_dim, v_head_dim=shape.v_head_dim)
    elif shape.value_dim != shape.head_dim:
        raise ValueError(
            f"values of {shape.value_dim} beside keys of {shape.head_dim} elements are not supported there"
        )
    elif shape.num_heads == shape.num_kv_heads:
        blocks = (query_heads_cut(weight.out_features, shape),)
    else:
        blocks = grouped_attention_blocks(shape.num_heads, shape.num_kv_heads, shape.head_dim)
    return Partition.column(blocks, dim=weight.out_dim)


def attention_cut(weight: Weight, what: Role) -> Partition:
    """The cut by whole heads of a weight that holds one of Q, K, V, or that reads what attention gives."""
    shape = weight.attention
    if shape is None:
        raise ValueError("the heads of its attention are not known")
    if not heads_fit(weight, what):
        raise ValueError(
            f"it has {weight.out_features} output features, but {shape.num_kv_heads} KV heads of {shape.head_dim}"
        )
    if what == "out":
        return Partition.row([query_heads_cut(weight.in_features, shape)], dim=weight.in_dim)
    block = kv_heads_cut if what in ("key", "value") else query_heads_cut
    return Partition.column([block(weight.out_features, shape)], dim=weight.out_dim)


def heads_fit(weight: Weight, what: Role) -> bool:
    """Whether the weight's heads are known, and can be those of this projection.

    The heads of a text model are not those of a vision tower beside it.
    """
    shape = weight.attention
    if shape is None:
        return False
    if what in ("key", "value"):
        return weight.out_features == shape.num_kv_heads * (shape.head_dim if what == "key" else shape.value_dim)
    return True


def ranks_without_heads(shape: AttentionShape, world: int) -> list[int]:
    """The ranks that would own no query head."""
    return [rank for rank in range(world) if not heads.query_heads(shape.num_heads, shape.num_kv_heads, rank, world)]


def _by_heads(what: Literal["query", "kv"], size: int, count: int, shape: AttentionShape) -> Block:
    if size % count:
        raise ValueError(f"{size} features are not a whole number of {count} {what} heads")
    return Block(size, heads=Heads(what, shape.num_heads, shape.num_kv_heads, size // count))
