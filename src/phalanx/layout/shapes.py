"""`shape` and `view` of a layer spec -> Partition of a weight of known size."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Literal

from phalanx.layout.fused import attention_cut
from phalanx.layout.partition import Block, Heads, Partition, attention_blocks
from phalanx.layout.roles import role
from phalanx.layout.rules import LayerSpec
from phalanx.layout.weight import Weight


def declared_cut(weight: Weight, spec: LayerSpec) -> Partition:
    """The cut that a spec with `shape` or `view` declares. Raises ValueError if the weight cannot have that shape."""
    if spec.view is not None:
        return _column(weight, _fill(spec.view, weight.out_features, f"view {list(spec.view)}"), spec.axis)
    if spec.shape is None:
        raise ValueError("the spec declares neither shape nor view")
    shape, dim = list(spec.shape), spec.cut_dim
    text = f"shape {_plain(spec.shape)}"
    if weight.kind == "experts":
        shape, dim = _inside_experts(weight, shape, dim, text)
    *outer, last = shape
    if not isinstance(last, tuple) and last not in (-1, weight.in_features) and spec.partition_type != "row":
        raise ValueError(f"{text} ends in {last}, but the weight has {weight.in_features} input features")
    if spec.partition_type == "row":
        _fill([size if isinstance(size, int) else prod(size) for size in outer], weight.out_features, text)
        return _row(weight, last, text)
    entry = outer[dim]
    sizes = [size if index != dim and isinstance(size, int) else -1 for index, size in enumerate(outer)]
    if isinstance(entry, tuple):
        sizes[dim] = sum(entry)
    view = _fill(sizes, weight.out_features, text)
    return _column(weight, view, dim, _sub_sizes(entry, view[dim], text))


def _row(weight: Weight, last: int | tuple[int, ...], text: str) -> Partition:
    total = weight.in_features
    if isinstance(last, tuple) and sum(last) != total:
        raise ValueError(f"{text}: the sizes sum to {sum(last)}, but the weight has {total} input features")
    sizes = _sub_sizes(last, total, text)
    if len(sizes) == 1:
        return Partition.row(dim=weight.in_dim) if weight.attention is None else attention_cut(weight, "out")
    return Partition.row([Block(size) for size in sizes], dim=weight.in_dim)


def _column(weight: Weight, view: Sequence[int], axis: int, sizes: Sequence[int] = ()) -> Partition:
    grid = () if len(view) == 1 else tuple(view)
    at = axis if grid else 0
    return Partition.column(_blocks(weight, view, axis, sizes), view=grid, axis=at, dim=weight.out_dim)


def _blocks(weight: Weight, view: Sequence[int], axis: int, sizes: Sequence[int]) -> Sequence[Block]:
    """The blocks of the cut axis; those of an attention follow its heads where the sizes are those of its heads."""
    size, heads = view[axis], weight.attention
    plain = [Block(each) for each in sizes] if len(sizes) > 1 else []
    if heads is None:
        return plain
    if len(sizes) == 3 and len(view) == 1:
        whole = attention_blocks(heads.num_heads, heads.num_kv_heads, heads.head_dim, v_head_dim=heads.v_head_dim)
        expected = [block.size for block in whole]
        if expected == list(sizes):
            return whole
        if role(weight) == "qkv":
            raise ValueError(
                f"three sub-parameters of {', '.join(map(str, sizes))} features cannot be Q, K and V, which are "
                f"{', '.join(map(str, expected))} ({heads.num_heads} query and {heads.num_kv_heads} KV heads): "
                f"declare shape {[expected, -1]}, or leave 'shape' out"
            )
    if len(sizes) > 1:
        whole_heads = [heads.head_dim if each % heads.head_dim == 0 else 1 for each in sizes]
        return [Block(each, unit) for each, unit in zip(sizes, whole_heads, strict=True)]
    if len(view) == 1 and role(weight) in ("query", "key", "value", "expand"):
        return attention_cut(weight, role(weight)).blocks
    roles: tuple[Literal["query", "kv"], ...] = ("query", "kv")
    for kind, count in zip(roles, (heads.num_heads, heads.num_kv_heads), strict=True):
        width = size // count
        if size == count * width and width in (1, heads.head_dim, heads.value_dim):
            return [Block(size, heads=Heads(kind, heads.num_heads, heads.num_kv_heads, width))]
    return plain


def _sub_sizes(entry: int | tuple[int, ...], total: int, text: str) -> tuple[int, ...]:
    """The sizes of the sub-parameters that `shape` declares at the cut dimension."""
    if isinstance(entry, tuple):
        return entry
    # A count; the size of the whole dimension means that it is one.
    count = 1 if entry in (-1, total) else entry
    if total % count:
        raise ValueError(f"{text}: {total} elements are not {count} equal sub-parameters")
    return (total // count,) * count


def _fill(sizes: Sequence[int], total: int, text: str) -> tuple[int, ...]:
    """`sizes` with their -1 inferred such that their product is `total`."""
    known = prod(size for size in sizes if size != -1)
    unknown = sum(size == -1 for size in sizes)
    if unknown > 1:
        raise ValueError(f"{text} leaves more than one output dimension open: give all but one of them")
    if total % known or (not unknown and known != total):
        raise ValueError(f"{text} does not fit the {total} output features of the weight: its sizes make {known}")
    return tuple(total // known if size == -1 else size for size in sizes)


def _inside_experts(
    weight: Weight, shape: list[int | tuple[int, ...]], dim: int, text: str
) -> tuple[list[int | tuple[int, ...]], int]:
    """The shape of one expert, from that of all experts of a layer in one tensor [experts, out, in]."""
    if len(shape) < 3 or shape[0] not in (-1, weight.shape[0]):
        raise ValueError(f"{text}: the weight holds {weight.shape[0]} experts: start with their number, or -1")
    if dim == 0:
        raise ValueError(
            f"{text} cuts between experts, which is expert parallelism: cut inside of each (partition_dim 1)"
        )
    return shape[1:], dim - 1


def _plain(value: object) -> object:
    return [_plain(each) for each in value] if isinstance(value, tuple) else value
