"""What an attention block must know once its heads are dealt over the ranks.

Hugging Face attentions read head counts from their own attributes, from `self.config`, or from the shapes of what
their projections return. A block whose projections were cut gets this rank's counts in its own attributes and in a
shallow copy of its config; nothing outside of the block changes.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.layout import kv_heads, query_heads
from phalanx.layout.weight import AttentionShape

_HEADS = (
    "num_heads",
    "num_attention_heads",
    "n_heads",
    "n_head",
    "num_attn_heads",
    "num_attention_heads_per_partition",
)
_KV_HEADS = (
    "num_key_value_heads",
    "num_kv_heads",
    "kv_n_heads",
    "n_kv_heads",
    "kv_heads",
    "num_multi_query_groups_per_partition",
)
_GROUPS = ("num_key_value_groups", "num_kv_groups", "n_rep")
_WIDTHS = (
    "embed_dim",
    "hidden_size",
    "split_size",
    "inner_dim",
    "all_head_size",
    "d_model",
    "hidden_size_per_partition",
    "projection_size",
)
_KV_WIDTHS = ("kv_dim",)
# Tensors that hold something for every head: [batch x heads, ...], [batch, heads, ...] or [heads, ...].
_PER_HEAD = ("alibi", "position_bias", "attention_mask")


def keep_own_heads(block: nn.Module, shape: AttentionShape, rank: int, world: int) -> None:
    """Tell `block`, whose projections hold this rank's heads, of how many it has; give it its heads' part of biases."""
    queries = query_heads(shape.num_heads, shape.num_kv_heads, rank, world)
    count = len(kv_heads(shape.num_heads, shape.num_kv_heads, rank, world))
    values = [
        (_HEADS, shape.num_heads, len(queries)),
        (_KV_HEADS, shape.num_kv_heads, count),
        (_GROUPS, shape.num_heads // shape.num_kv_heads, len(queries) // count),
        (_WIDTHS, shape.num_heads * shape.head_dim, len(queries) * shape.head_dim),
        (_KV_WIDTHS, shape.num_kv_heads * shape.head_dim, count * shape.head_dim),
    ]
    for names, whole, own in values:
        _replace(block, names, whole, own)
    if hasattr(block, "config"):
        block.config = copy.copy(block.config)
        for names, whole, own in values[:2]:
            _replace(block.config, names, whole, own)
    block.register_forward_pre_hook(_HeadSlices(shape.num_heads, queries), with_kwargs=True)


def _replace(owner: Any, names: tuple[str, ...], whole: int, own: int) -> None:
    for name in names:
        value = getattr(owner, name, None)
        if isinstance(value, int) and not isinstance(value, bool) and value == whole:
            setattr(owner, name, own)


class _HeadSlices:
    """Hands on only this rank's heads of what a model computes for all heads (ALiBi)."""

    def __init__(self, num_heads: int, own: range) -> None:
        self.num_heads = num_heads
        self.own = own

    def __call__(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        changed = {name: self.slice(kwargs[name]) for name in _PER_HEAD if isinstance(kwargs.get(name), Tensor)}
        return args, {**kwargs, **changed}

    def slice(self, t: Tensor) -> Tensor:
        """`t` without other ranks' heads; a tensor that has no dimension of all heads as it is."""
        first, last = self.own.start, self.own.stop
        if t.dim() == 4 and t.shape[1] == self.num_heads and self.num_heads > 1:
            return t[:, first:last]
        if t.dim() == 3 and t.shape[1] == 1 and t.shape[0] % self.num_heads == 0:
            return t.view(-1, self.num_heads, *t.shape[1:])[:, first:last].flatten(0, 1)
        return t


def is_latent_kv(path: str) -> bool:
    """Whether a module projects to the latent KV of multi-head latent attention (DeepSeek-V2, arXiv:2405.04434)."""
    return path.rpartition(".")[2] == "kv_a_proj_with_mqa"


def has_dropout(block: nn.Module) -> bool:
    """Whether the block drops out anything that is computed for each head."""
    rates = [getattr(block, name, 0.0) for name in ("attention_dropout", "attn_dropout", "dropout", "dropout_prob")]
    return any(
        (rate.p if isinstance(rate, nn.Dropout) else rate) for rate in rates if isinstance(rate, float | nn.Dropout)
    )


class RegionRandom:
    """Random numbers inside a region: other ones on each rank, drawn from the common state, which they do not advance
    further than by one number. A recomputed forward that starts from the same state draws the same ones again."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._outside: tuple[Tensor, Tensor | None] | None = None

    @torch._dynamo.disable
    def enter(self, device: torch.device) -> None:
        seed = int(torch.randint(2**40, ()))
        self._outside = torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        torch.manual_seed(seed * 65536 + self.rank)

    @torch._dynamo.disable
    def leave(self, device: torch.device) -> None:
        if self._outside is None:
            return
        cpu, cuda = self._outside
        torch.set_rng_state(cpu)
        if cuda is not None:
            torch.cuda.set_rng_state(cuda, device)
        self._outside = None
