"""The attention that a module of transformers calls, through the interface that the library has for such things.

Modules look their attention up by name and hand it the keyword arguments of their forward. So one argument of ours, the
`phalanx` that `forward` was called with, says what happens with queries, keys and values: they are noted (`Notes`), or
attended over the blocked KV cache.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from phalanx.models.hf_config import ModelConfigError
from phalanx.models.placement import Placement
from phalanx.ops.batch import RaggedBatch

NAME = "phalanx_ragged"
"""What a config's `attn_implementation` says to get it."""

_PLACES = ("position_ids", "cache_position")
"""Tensors that a module hands on which say nothing that a batch does not."""


@dataclass(frozen=True)
class LayerAttention:
    """What a layer asks of its attention: heads of the whole model, factor of the scores, window and soft cap."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None
    soft_cap: float | None


class Attends(Protocol):
    """What the argument `phalanx` of a forward does with a layer's heads."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, asked: LayerAttention) -> Tensor:
        """q [1, H, T, D], k and v [1, Hkv, T, D] -> [1, T, H, D]."""


def register() -> None:
    """Make the attention known to transformers; more than once is fine."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, ragged_attention)


def ragged_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    phalanx: Attends | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """An attention function of transformers.

    Raises:
        ModelConfigError: the module asks for something that the blocked attention does not do, by name.
    """
    name = type(module).__name__
    if phalanx is None:
        raise ModelConfigError(f"{name} does not hand on the keyword arguments of the forward")
    if attention_mask is not None:
        raise ModelConfigError(f"{name} masks its attention in a way of its own")
    tensors = [n for n, each in others.items() if isinstance(each, Tensor) and n not in _PLACES]
    if tensors:
        raise ModelConfigError(f"{name} asks for attention with {', '.join(tensors)}, which is not supported")
    causal = others.get("is_causal")
    if not (getattr(module, "is_causal", True) if causal is None else causal):
        raise ModelConfigError(f"{name} attends to later tokens")
    if value.shape[-1] != query.shape[-1]:
        raise ModelConfigError(f"{name} has values of {value.shape[-1]} beside queries of {query.shape[-1]} elements")
    asked = LayerAttention(
        query.shape[1],
        key.shape[1],
        query.shape[-1],
        query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        sliding_window,
        softcap,
    )
    return phalanx.attend(module.layer_idx, query, key, value, asked), None


class Notes:
    """Notes what each layer asks for; its answer has the right shape and nothing else."""

    def __init__(self) -> None:
        self.layers: dict[int, LayerAttention] = {}

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, asked: LayerAttention) -> Tensor:
        if layer in self.layers:
            raise ModelConfigError(f"layer {layer} attends more than once")
        self.layers[layer] = asked
        return torch.zeros_like(q).transpose(1, 2)


class Ragged:
    """Attends over the blocked KV cache for one batch, and writes its keys and values there."""

    def __init__(
        self,
        placement: Placement,
        batch: RaggedBatch,
        caches: list[tuple[Tensor, Tensor]],
        group_of: dict[int, int],
    ) -> None:
        self._batch, self._caches, self._group_of = batch, caches, group_of
        self._attention: Callable[..., Tensor] = placement.op("attention")
        self._write: Callable[..., Tensor] = placement.op("rope_write_kv")

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, asked: LayerAttention) -> Tensor:
        batch, cache, group = self._batch, self._caches[layer], self._group_of[layer]
        q, k, v = (t[0].transpose(0, 1).contiguous() for t in (q, k, v))
        q = self._write(q, k, v, None, None, batch.slot_mapping[group], *cache, interleaved=False)
        out = self._attention(
            q,
            *cache,
            batch.block_tables[group],
            batch.cu_seqlens_q,
            batch.seq_lens,
            scale=asked.scale,
            window=asked.window,
            soft_cap=asked.soft_cap,
            max_query_len=batch.max_query_len,
            max_seq_len=batch.max_seq_len,
        )
        return out[None]
