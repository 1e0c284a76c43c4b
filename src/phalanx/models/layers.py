"""The modules of a Transformer layer: each knows how its parameters are cut and laid out, and how it computes.

A module's ``transform`` takes a checkpoint tensor, or its parts in block order (lazy file slices included), cuts first,
then joins, then converts. Activations are ragged: [T, hidden], T tokens of all sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from phalanx.distributed.group import Group
from phalanx.layout.partition import Block, Partition, local_shape
from phalanx.models.parameter import InferenceParameter
from phalanx.models.placement import Placement
from phalanx.ops import registry
from phalanx.ops.batch import RaggedBatch
from phalanx.ops.linear import (
    PreparedWeight,
    TreeBackend,
    embedding_lookup,
    gated_linear,
    linear,
    prepare_linear,
    wide_linear,
)

QueryKeyStep = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""What is done to queries and keys before rope: [T, heads, head_dim] each -> the same."""


def split_sizes(blocks: Sequence[Block], group: Group) -> list[int]:
    """This rank's length of each block."""
    partitions = [Partition.column(blocks=(block,)) for block in blocks]
    return [local_shape(p, (b.size,), group.rank, group.size)[0] for p, b in zip(partitions, blocks, strict=True)]


class Linear:
    """``x @ W.T + b`` with the weight cut by output features (column) or input features (row).

    A row-cut weight gives partial sums: they are added up over the ranks, then the bias once.

    Args:
        placement: where it lies.
        partition: column or row, with its blocks.
        in_features, out_features: full sizes.
    """

    def __init__(self, placement: Placement, partition: Partition, in_features: int, out_features: int) -> None:
        self.placement = placement
        self.partition = partition
        self.in_features = in_features
        self.out_features = out_features
        self.is_row = partition.kind == "row"
        self.late_sum = False
        """Leave the sum over the ranks to the norm behind (row-cut only); the bias is rank 0's to add then."""
        if self.is_row and placement.batch_invariant and placement.device.type == "cuda":
            self._check_equal_shares()

    def _check_equal_shares(self) -> None:
        """Sums over ranks are those of one rank only where all ranks hold equal parts of them."""
        size = self.placement.group.size
        shape = (self.out_features, self.in_features)
        shares = {local_shape(self.partition, shape, rank, size)[1] for rank in range(size)}
        if size > 1 and (len(shares) > 1 or size not in (2, 4, 8) or self.in_features % 8):
            raise ValueError(
                f"batch_invariant: {self.in_features} inputs of a row-cut weight over {size} ranks give parts of "
                f"{sorted(shares)}: it needs 2, 4 or 8 ranks, equal parts and a multiple of 8"
            )

    def transform(self, value: Any) -> InferenceParameter | None:
        """A weight [out, in] or bias [out], whole or as its parts in block order -> this rank's; None stays None.

        Raises:
            ValueError: some parts are absent, or they do not make up the weight.
        """
        parts = list(value) if isinstance(value, (list, tuple)) else [value]
        absent = [part is None for part in parts]
        if all(absent):
            return None
        if any(absent):
            raise ValueError(
                f"the checkpoint lacks {sum(absent)} of {len(parts)} parts of a fused weight: give all or none"
            )
        tensor = self.cut(parts)
        if tensor.dim() == 1:
            return InferenceParameter(tensor)
        return prepared(tensor, self.placement, self.placement.quantization)

    def cut(self, parts: Sequence[Any]) -> Tensor:
        """This rank's part of a weight [out, in] or bias [out] that is given whole, or as its parts in block order.

        Raises:
            ValueError: the parts do not make up the weight.
        """
        is_bias = len(parts[0].shape) == 1
        self._check_shapes([tuple(part.shape) for part in parts], is_bias)
        if is_bias and self.is_row:
            return self.placement.cut(parts[0], Partition.replicate())
        return self.placement.cut(parts[0], self.partition) if len(parts) == 1 else self._join(parts)

    def _check_shapes(self, shapes: list[tuple[int, ...]], is_bias: bool) -> None:
        sizes = [block.size for block in self.partition.blocks] if len(shapes) > 1 else [self.out_features]
        expected = [(size,) if is_bias else (size, self.in_features) for size in sizes]
        if shapes != expected:
            raise ValueError(f"given {_shapes(shapes)}, expected {_shapes(expected)}")

    def _join(self, parts: Sequence[Any]) -> Tensor:
        """The parts, each cut by its block, one below the other: written into place one by one."""
        placement, blocks = self.placement, self.partition.blocks
        sizes = split_sizes(blocks, placement.group)
        shape = (sum(sizes), *parts[0].shape[1:])
        out = torch.empty(shape, dtype=placement.dtype, device=placement.device)
        for rows, part, block in zip(out.split_with_sizes(sizes), parts, blocks, strict=True):
            placement.cut_into(rows, part, Partition.column((block,)))
        return out

    def __call__(self, x: Tensor, weight: InferenceParameter, bias: InferenceParameter | None = None) -> Tensor:
        """x [T, in of this rank] -> [T, out of this rank]; for a row-cut weight the full sum on every rank, unless the
        sum is left to what follows."""
        shift = None if bias is None else bias.data
        if not self.is_row or self.placement.group.size == 1:
            return linear(x, as_prepared(weight), shift)
        if self.late_sum:
            return linear(x, as_prepared(weight), shift if self.placement.group.rank == 0 else None)
        total = self._sum_over_ranks(x, as_prepared(weight))
        return total if shift is None else total + shift

    def gated(
        self, x: Tensor, weight: InferenceParameter, bias: InferenceParameter | None, activation: str
    ) -> Tensor | None:
        """Of a column-cut weight whose outputs are gate | up: the gated activation of the product, [T, half of out],
        where the back end makes both at once; else None."""
        return gated_linear(x, as_prepared(weight), None if bias is None else bias.data, activation)

    def _sum_over_ranks(self, x: Tensor, weight: PreparedWeight) -> Tensor:
        group, backend = self.placement.group, weight.backend
        if not self.placement.batch_invariant or not isinstance(backend, TreeBackend):
            return group.all_reduce(linear(x, weight))
        return backend.join(group.all_gather(backend.part(x, weight, group.size)[None])).to(x.dtype)


def _shapes(shapes: Sequence[tuple[int, ...]]) -> str:
    return " + ".join(map(str, shapes))


def prepared(weight: Tensor, placement: Placement, layout: str | None = None) -> InferenceParameter:
    """A weight in the layout that the device's matmul likes, or in the one named ``layout``."""
    result = prepare_linear(weight, forced=placement.forced.get("linear"), layout=layout)
    shape = (result.out_features, result.in_features)
    return PreparedParameter(result.data, result.layout, shape, result.aux, result)


class PreparedParameter(InferenceParameter):
    """An InferenceParameter that keeps the prepared weight which its tensors make up."""

    def __init__(
        self, data: Tensor, layout: str, shape: tuple[int, ...], aux: Any = None, weight: PreparedWeight | None = None
    ) -> None:
        super().__init__(data, layout, shape, aux or {})
        self.weight = weight


def as_prepared(parameter: InferenceParameter) -> PreparedWeight:
    """The prepared weight of a parameter."""
    if isinstance(parameter, PreparedParameter) and parameter.weight is not None:
        return parameter.weight
    raise TypeError(f"a {type(parameter).__name__} of layout {parameter.layout!r} is not a prepared linear weight")


class Norm:
    """RMSNorm or LayerNorm over the hidden size, alone or after a residual addition.

    Args:
        kind: "rms_norm" or "layer_norm".
        eps: the model's epsilon.
        offset: what is added to the weights of a checkpoint; in float32, since they lie near it.
    """

    def __init__(self, placement: Placement, kind: str, eps: float, offset: float = 0.0) -> None:
        self.placement = placement
        self.kind = kind
        self.eps = eps
        self.offset = offset
        self.late_sums = False
        """What ``add`` takes as x is this rank's part of a sum over the ranks."""
        self._norm: Callable[..., Tensor] = placement.op(kind)
        self._add_norm: Callable[..., tuple[Tensor, Tensor]] | None = (
            placement.op("add_rms_norm") if kind == "rms_norm" else None
        )

    def transform(self, value: Any) -> InferenceParameter | None:
        """A weight, whole; None stays None."""
        if value is None:
            return None
        if not self.offset:
            return InferenceParameter(self.placement.cut(value, Partition.replicate()))
        wide = torch.promote_types(self.placement.dtype, torch.float32)
        return InferenceParameter(self.placement.cut(value, Partition.replicate(), wide).add_(self.offset))

    def __call__(self, x: Tensor, weight: InferenceParameter | None, bias: InferenceParameter | None = None) -> Tensor:
        """x [T, hidden] -> its norm. Only a LayerNorm can be without weight."""
        if self.kind == "layer_norm":
            return self._norm(x, None if weight is None else weight.data, None if bias is None else bias.data, self.eps)
        if weight is None:
            raise ValueError("an RMSNorm needs its weight")
        return self._norm(x, weight.data, self.eps)

    def add(
        self,
        x: Tensor,
        residual: Tensor | None,
        weight: InferenceParameter | None,
        bias: InferenceParameter | None = None,
    ) -> tuple[Tensor, Tensor]:
        """(norm of x + residual, x + residual); without a residual, (norm of x, x)."""
        if residual is None:
            return self(x, weight, bias), x
        if self.late_sums:
            group = self.placement.group
            if self._add_norm is not None and weight is not None:
                at_once = group.all_reduce_add_rms_norm(x, residual, weight.data, self.eps)
                if at_once is not None:
                    return at_once
            x = group.all_reduce(x)
        if self._add_norm is not None and weight is not None:
            return self._add_norm(x, residual, weight.data, self.eps)
        total = x + residual
        return self(total, weight, bias), total


class Attention:
    """Attention of this rank's heads over the blocked KV cache, rope and the write of new K and V included.

    Args:
        num_heads, num_kv_heads: this rank's; head_dim of both.
        scale: factor of the scores.
        window: keys that a query sees, itself included; None for all.
        soft_cap: bound of the scores by tanh; None for none.
        key_bias: float32 [num_heads, positions], added to the scores of a key by its position (ALiBi); None for none.
    """

    def __init__(
        self,
        placement: Placement,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        scale: float,
        window: int | None = None,
        soft_cap: float | None = None,
        interleaved_rope: bool = False,
        key_bias: Tensor | None = None,
    ) -> None:
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.scale, self.window, self.soft_cap = scale, window, soft_cap
        self.interleaved_rope = interleaved_rope
        narrow = frozenset(("fp8_kv",) if placement.kv_dtype != placement.dtype else ())
        attention = placement.op("attention", needs=narrow | (frozenset() if key_bias is None else {"key_bias"}))
        # Implementations without the feature need not know its argument.
        self._attention: Callable[..., Tensor] = (
            attention if key_bias is None else partial(attention, key_bias=key_bias)
        )
        self._rope_write: Callable[..., Tensor] = placement.op("rope_write_kv", needs=narrow)
        # Where another implementation would have to step in for the norms, they stand alone.
        fused = next((i for i in registry.implementations("rope_write_kv") if i.function is self._rope_write), None)
        self.fuses_norms = fused is not None and "qk_norm" in fused.features

    def __call__(
        self,
        qkv: Tensor,
        kv: tuple[Tensor, Tensor],
        batch: RaggedBatch,
        kv_group: int,
        cos_sin: tuple[Tensor, Tensor] | None,
        before_rope: QueryKeyStep | None = None,
        norms: Mapping[str, Any] = MappingProxyType({}),
    ) -> Tensor:
        """qkv [T, (heads + 2 kv_heads) * head_dim] of this rank -> [T, heads * head_dim].

        ``cos_sin`` is None for a layer without rope, ``before_rope`` where queries and keys stay as they are; ``norms``
        are the arguments of ``rope_write_kv`` that norm them, where that ``fuses_norms``.
        """
        heads = qkv.view(qkv.shape[0], -1, self.head_dim)
        q = heads[:, : self.num_heads]
        k = heads[:, self.num_heads : self.num_heads + self.num_kv_heads]
        v = heads[:, self.num_heads + self.num_kv_heads :]
        if before_rope is not None:
            q, k = before_rope(q, k)
        cos, sin = cos_sin if cos_sin is not None else (None, None)
        slots = batch.slot_mapping[kv_group]
        q = self._rope_write(q, k, v, cos, sin, slots, *kv, interleaved=self.interleaved_rope, **norms)
        out = self._attention(
            q,
            *kv,
            batch.block_tables[kv_group],
            batch.cu_seqlens_q,
            batch.seq_lens,
            scale=self.scale,
            window=self.window,
            soft_cap=self.soft_cap,
            max_query_len=batch.max_query_len,
            max_seq_len=batch.max_seq_len,
        )
        return out.reshape(out.shape[0], -1)


class Embedding:
    """Rows of a table that is cut by vocabulary: each rank looks up the ids that it owns, the ranks add up.

    Args:
        vocab_size, hidden_size: full sizes.
        tied: the table is also the head's weight, and lies in the head's layout.
    """

    def __init__(self, placement: Placement, vocab_size: int, hidden_size: int, tied: bool) -> None:
        self.placement, self.tied = placement, tied
        self.first, self.rows = vocab_range(vocab_size, placement.group)

    def transform(self, value: Any) -> InferenceParameter:
        table = self.placement.cut(value, Partition.vocab())
        return prepared(table, self.placement) if self.tied else InferenceParameter(table)

    def __call__(self, ids: Tensor, table: InferenceParameter) -> Tensor:
        """ids int64 [T] -> [T, hidden]."""
        if self.placement.group.size == 1:
            return self._lookup(ids, table)
        if self.rows == 0:
            return self.placement.group.all_reduce(self._zeros(ids, table))
        local = ids - self.first
        owned = (local >= 0) & (local < self.rows)
        found = self._lookup(torch.where(owned, local, 0), table)
        return self.placement.group.all_reduce(torch.where(owned[:, None], found, 0))

    def _lookup(self, ids: Tensor, table: InferenceParameter) -> Tensor:
        if isinstance(table, PreparedParameter):
            return embedding_lookup(as_prepared(table), ids)
        return torch.nn.functional.embedding(ids, table.data)

    def _zeros(self, ids: Tensor, table: InferenceParameter) -> Tensor:
        return torch.zeros(ids.shape[0], table.shape[1], dtype=self.placement.dtype, device=ids.device)


class Unembedding:
    """Logits over the vocabulary, which is cut over the ranks.

    Args:
        vocab_size, hidden_size: full sizes.
    """

    def __init__(self, placement: Placement, vocab_size: int, hidden_size: int) -> None:
        self.placement = placement
        group = placement.group
        self._sizes = [local_shape(Partition.vocab(), (vocab_size,), rank, group.size)[0] for rank in range(group.size)]
        self.first = sum(self._sizes[: group.rank])
        """This rank's first token id."""

    def transform(self, value: Any) -> InferenceParameter:
        """A weight [vocab, hidden] or bias [vocab] -> this rank's."""
        part = self.placement.cut(value, Partition.vocab())
        return prepared(part, self.placement) if part.dim() == 2 else InferenceParameter(part)

    def __call__(self, x: Tensor, weight: InferenceParameter, bias: InferenceParameter | None = None) -> Tensor:
        """x [R, hidden] -> float32 [R, vocab of this rank]."""
        return wide_linear(x, as_prepared(weight), None if bias is None else bias.data).float()

    def gather(self, logits: Tensor) -> Tensor:
        """Every rank's float32 [R, vocab of the rank] -> [R, vocab_size], equal on every rank."""
        return self.placement.group.all_gather(logits, -1, self._sizes)


def vocab_range(vocab_size: int, group: Group) -> tuple[int, int]:
    """First row and number of rows of this rank's part of a vocabulary."""
    sizes = [local_shape(Partition.vocab(), (vocab_size,), rank, group.size)[0] for rank in range(group.rank + 1)]
    return sum(sizes[:-1]), sizes[-1]
