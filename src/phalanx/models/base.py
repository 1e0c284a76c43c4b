"""TransformerModel: declared traits become modules, and a ragged forward over a blocked KV cache.

Shapes: T tokens of all sequences of a step, R rows whose logits are wanted; hidden states are [T, hidden_size].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from phalanx.config import EngineConfig, parse_dtype
from phalanx.distributed.group import Group
from phalanx.layout.partition import Block, Partition, attention_blocks
from phalanx.models.container import LayerContainer
from phalanx.models.hf_config import HFConfig, ModelConfigError
from phalanx.models.kv_spec import KVCacheSpec, KVGroup, kv_groups
from phalanx.models.layers import Attention, Embedding, Linear, Norm, Placement, Unembedding, split_sizes
from phalanx.models.parameter import InferenceParameter
from phalanx.models.rope import RopeSettings, RotaryEmbedding, rope_settings
from phalanx.ops.activation import check_activation
from phalanx.ops.batch import RaggedBatch


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


@dataclass(frozen=True)
class StepState:
    """What every layer of one forward shares."""

    batch: RaggedBatch
    cos_sin: tuple[Tensor, Tensor] | None


class TransformerModel:
    """A decoder-only Transformer, pre-norm and sequential. A family overrides the traits (the properties under
    "traits") that its config spells otherwise, and only where it computes differently a ``make_*`` hook or a step.

    Args:
        config: the Hugging Face config.
        engine_config: dtype, device, forced back ends, block size.
        group: the tensor-parallel group.

    Raises:
        ModelConfigError, ValueError: something in the config is not supported, by name.
    """

    def __init__(self, config: HFConfig, engine_config: EngineConfig, group: Group) -> None:
        self.config = config
        self.engine_config = engine_config
        self.group = group
        self.device = device_of(engine_config, group)
        self.dtype = self._dtype()
        self.placement = Placement(group, self.device, self.dtype, dict(engine_config.ops))
        self._check_traits()
        self.norm = self.make_norm_layer()
        self.qkv = self.make_qkv_layer()
        self.attention = [self.make_attn_layer(layer) for layer in range(self.num_layers)]
        self.attn_out = self.make_attn_out_layer()
        self.mlp_1 = self.make_mlp_1_layer()
        self.mlp_2 = self.make_mlp_2_layer()
        self.embed = self.make_embedding_layer()
        self.unembed = self.make_unembedding_layer()
        self.rotary = RotaryEmbedding(self.rope, self.device) if self.rope is not None else None
        self.layers: list[Any] = []
        self.outer: Any = None
        self._kv: list[tuple[Tensor, Tensor]] = []

    # -- traits: what a family declares

    @cached_property
    def num_layers(self) -> int:
        return int(self.config.num_hidden_layers)

    @cached_property
    def hidden_size(self) -> int:
        return int(self.config.hidden_size)

    @cached_property
    def intermediate_size(self) -> int:
        return int(self.config.intermediate_size)

    @cached_property
    def vocab_size(self) -> int:
        return int(self.config.vocab_size)

    @cached_property
    def num_heads(self) -> int:
        return int(self.config.num_attention_heads)

    @cached_property
    def num_kv_heads(self) -> int:
        return int(self.config.get("num_key_value_heads") or self.num_heads)

    @cached_property
    def head_dim(self) -> int:
        return int(self.config.get("head_dim") or self.hidden_size // self.num_heads)

    @cached_property
    def max_sequence_length(self) -> int:
        """Tokens that the config calls the model good for, rope scaling counted in."""
        return scaled_length(self.rope) if self.rope is not None else int(self.config.max_position_embeddings)

    @cached_property
    def norm_type(self) -> str:
        """ "rms_norm" or "layer_norm"."""
        return "rms_norm"

    @cached_property
    def norm_eps(self) -> float:
        return float(self.config.rms_norm_eps)

    @cached_property
    def activation(self) -> str:
        return str(self.config.hidden_act)

    @cached_property
    def gated_mlp(self) -> bool:
        """Whether the MLP is ``down(act(gate) * up)`` rather than ``down(act(up))``."""
        return True

    @cached_property
    def qkv_bias(self) -> bool:
        return bool(self.config.get("attention_bias", False))

    @cached_property
    def attn_out_bias(self) -> bool:
        return bool(self.config.get("attention_bias", False))

    @cached_property
    def mlp_bias(self) -> bool:
        return bool(self.config.get("mlp_bias", False))

    @cached_property
    def rope(self) -> RopeSettings | None:
        """Rotary positions; None for a model without."""
        return rope_settings(self.config, self.head_dim)

    @cached_property
    def interleaved_rope(self) -> bool:
        """Rotated pairs are neighbours (GPT-J) rather than half a head apart (NeoX)."""
        return False

    @cached_property
    def attention_scale(self) -> float:
        return float(self.head_dim**-0.5)

    @cached_property
    def attention_soft_cap(self) -> float | None:
        return None

    def window(self, layer: int) -> int | None:
        """Tokens that a query of this layer sees, itself included; None for all."""
        return None

    @cached_property
    def tied_head(self) -> bool:
        """The head is the embedding table, whatever head the checkpoint stores."""
        return bool(self.config.get("tie_word_embeddings", False))

    def unmapped_params(self) -> Sequence[str]:
        """Checkpoint names that this config makes meaningless."""
        return ("lm_head.weight",) if self.tied_head else ()

    # -- hooks: the modules

    def make_norm_layer(self) -> Norm:
        return Norm(self.placement, self.norm_type, self.norm_eps)

    def make_qkv_layer(self) -> Linear:
        """Fused [Q; K; V], cut by heads."""
        blocks = attention_blocks(self.num_heads, self.num_kv_heads, self.head_dim)
        return Linear(self.placement, Partition.column(blocks), self.hidden_size, sum(b.size for b in blocks))

    def make_attn_layer(self, layer: int) -> Attention:
        heads, kv_heads = self.local_heads
        return Attention(
            self.placement,
            heads,
            kv_heads,
            self.head_dim,
            self.attention_scale,
            self.window(layer),
            self.attention_soft_cap,
            self.interleaved_rope,
        )

    def make_attn_out_layer(self) -> Linear:
        query = attention_blocks(self.num_heads, self.num_kv_heads, self.head_dim)[0]
        return Linear(self.placement, Partition.row((query,)), query.size, self.hidden_size)

    def make_mlp_1_layer(self) -> Linear:
        """Fused [gate; up] of a gated MLP, else the up projection."""
        blocks = (Block(self.intermediate_size),) * (2 if self.gated_mlp else 1)
        return Linear(self.placement, Partition.column(blocks), self.hidden_size, sum(b.size for b in blocks))

    def make_mlp_2_layer(self) -> Linear:
        block = Block(self.intermediate_size)
        return Linear(self.placement, Partition.row((block,)), self.intermediate_size, self.hidden_size)

    def make_embedding_layer(self) -> Embedding:
        return Embedding(self.placement, self.vocab_size, self.hidden_size, self.tied_head)

    def make_unembedding_layer(self) -> Unembedding:
        return Unembedding(self.placement, self.vocab_size, self.hidden_size)

    # -- hooks: from checkpoint tensors to served ones; what Parameters call inside finalize()

    def transform_qkv_param(self, value: Any) -> InferenceParameter | None:
        """Fused [Q; K; V] weight or bias, or its three parts."""
        return self.qkv.transform(value)

    def transform_attn_out_param(self, value: Any) -> InferenceParameter | None:
        return self.attn_out.transform(value)

    def transform_mlp_1_param(self, value: Any) -> InferenceParameter | None:
        """Up projection; of a gated MLP [gate; up] or its two parts."""
        return self.mlp_1.transform(value)

    def transform_mlp_2_param(self, value: Any) -> InferenceParameter | None:
        return self.mlp_2.transform(value)

    def transform_embedding_param(self, value: Any) -> InferenceParameter:
        return self.embed.transform(value)

    def transform_unembed_param(self, value: Any) -> InferenceParameter | None:
        """The head's weight; None for a tied head, which is found at the embedding."""
        return None if value is None else self.unembed.transform(value)

    def transform_unembed_bias_param(self, value: Any) -> InferenceParameter | None:
        return self.unembed.transform_bias(value)

    def transform_norm_param(self, value: Any) -> InferenceParameter | None:
        return self.norm.transform(value)

    def set_parameters(self, transformer: Sequence[LayerContainer], non_transformer: LayerContainer | None) -> None:
        """Takes the filled containers."""
        self.layers = list(transformer)
        self.outer = non_transformer

    # -- hooks: the KV cache

    def kv_cache_spec(self, layer: int) -> KVCacheSpec:
        """What a layer keeps of a token on this rank."""
        return KVCacheSpec(self.local_heads[1], self.head_dim, self.dtype, self.window(layer))

    @cached_property
    def kv_groups(self) -> list[KVGroup]:
        """Layers that share a block table."""
        return kv_groups([self.kv_cache_spec(layer) for layer in range(self.num_layers)])

    @cached_property
    def kv_group_of(self) -> dict[int, int]:
        """Layer -> index of its KV group."""
        return {layer: index for index, group in enumerate(self.kv_groups) for layer in group.layers}

    def get_kv_requirements(
        self, sequence: SequenceState, max_new_tokens: int, max_new_blocks: int
    ) -> tuple[int, int]:
        """(tokens that can be added, blocks a KV group that they need) within ``max_new_blocks``."""
        size = self.engine_config.block_size
        needed = -(-(sequence.seen_tokens + max_new_tokens) // size) - sequence.num_blocks
        if needed <= max_new_blocks:
            return max_new_tokens, max(needed, 0)
        return (sequence.num_blocks + max_new_blocks) * size - sequence.seen_tokens, max_new_blocks

    def get_remaining_block_capacity(self, sequence: SequenceState) -> int:
        """Tokens that fit into the blocks which the sequence has already."""
        return sequence.num_blocks * self.engine_config.block_size - sequence.seen_tokens

    def maybe_allocate_kv(self, sequence: SequenceState, num_new_tokens: int, blocks: BlockSource) -> bool:
        """Gives the sequence what ``num_new_tokens`` need; False, with nothing taken, where that is not free."""
        tokens, needed = self.get_kv_requirements(sequence, num_new_tokens, blocks.free_blocks)
        if tokens < num_new_tokens:
            return False
        if needed:
            blocks.extend(sequence, needed)
        return True

    def set_kv_cache(self, caches: Sequence[tuple[Tensor, Tensor]]) -> None:
        """The K and V cache of every layer, [num_blocks, block_size, kv heads, head_dim] each."""
        self._kv = list(caches)

    # -- the forward

    def prepare_batch(self, batch: RaggedBatch) -> StepState:
        """What the layers share, computed once a forward: the rotary angles."""
        cos_sin = self.rotary.cos_sin(batch.positions, batch.rope_lens) if self.rotary is not None else None
        return StepState(batch, cos_sin)

    @torch.inference_mode()
    def forward(self, batch: RaggedBatch, layers: range | None = None) -> Tensor:
        """float32 logits [R, vocab_size] of ``batch.logits_indices``, equal on every rank.

        ``layers`` runs some layers only (to measure memory).
        """
        state = self.prepare_batch(batch)
        hidden, residual = self.forward_embed(batch), None
        for layer in layers if layers is not None else range(self.num_layers):
            hidden, residual = self.forward_layer(layer, hidden, residual, state)
        return self.forward_unembed(hidden, residual, batch)

    def forward_embed(self, batch: RaggedBatch) -> Tensor:
        return self.embed(batch.input_ids, self.outer.word_emb)

    def forward_layer(
        self, layer: int, hidden: Tensor, residual: Tensor | None, state: StepState
    ) -> tuple[Tensor, Tensor | None]:
        """The layer's output and the residual that is still to be added to it."""
        parameters = self.layers[layer]
        hidden, residual = self.norm.add(hidden, residual, parameters.attn_norm, bias_of(parameters, "attn_norm"))
        hidden = self.forward_attention(layer, hidden, state)
        hidden, residual = self.norm.add(hidden, residual, parameters.mlp_norm, bias_of(parameters, "mlp_norm"))
        return self.forward_mlp(layer, hidden), residual

    def forward_attention(self, layer: int, hidden: Tensor, state: StepState) -> Tensor:
        parameters = self.layers[layer]
        qkv = self.qkv(hidden, parameters.qkv, bias_of(parameters, "qkv"))
        out = self.attention[layer](qkv, self._kv[layer], state.batch, self.kv_group_of[layer], state.cos_sin)
        return self.attn_out(out, parameters.attn_out, bias_of(parameters, "attn_out"))

    def forward_mlp(self, layer: int, hidden: Tensor) -> Tensor:
        parameters = self.layers[layer]
        inner = self.mlp_1(hidden, parameters.mlp_1, bias_of(parameters, "mlp_1"))
        inner = self._activate(inner, self.activation)
        return self.mlp_2(inner, parameters.mlp_2, bias_of(parameters, "mlp_2"))

    def forward_unembed(self, hidden: Tensor, residual: Tensor | None, batch: RaggedBatch) -> Tensor:
        """Final norm and head, of the wanted rows only."""
        rows = batch.logits_indices
        picked = None if residual is None else residual[rows]
        x, _ = self.norm.add(hidden[rows], picked, self.outer.final_norm, bias_of(self.outer, "final_norm"))
        head = self.outer.word_emb if self.outer.word_unembed is None else self.outer.word_unembed
        return self.unembed(x, head, bias_of(self.outer, "word_unembed"))

    # -- derived

    @cached_property
    def local_heads(self) -> tuple[int, int]:
        """Query and KV heads of this rank."""
        query, key, _ = split_sizes(attention_blocks(self.num_heads, self.num_kv_heads, self.head_dim), self.group)
        return query // self.head_dim, key // self.head_dim

    @cached_property
    def _activate(self) -> Any:
        return self.placement.op("gated_activation" if self.gated_mlp else "activation")

    def _dtype(self) -> torch.dtype:
        if self.engine_config.dtype == "auto":
            return self.config.dtype or torch.float32
        return parse_dtype(self.engine_config.dtype)

    def _check_traits(self) -> None:
        check_activation(self.activation)
        for name in ("num_layers", "hidden_size", "intermediate_size", "vocab_size", "num_heads", "num_kv_heads"):
            if getattr(self, name) < 1:
                raise ModelConfigError(f"{name} must be at least 1, the config says {getattr(self, name)}")
        if self.num_heads % self.num_kv_heads:
            raise ModelConfigError(f"{self.num_heads} attention heads do not divide over {self.num_kv_heads} KV heads")


def bias_of(parameters: Any, name: str) -> InferenceParameter | None:
    """The bias that goes with a parameter, by the kit's naming: ``<name>_bias``; None where there is none."""
    return getattr(parameters, f"{name}_bias", None)


def device_of(config: EngineConfig, group: Group) -> torch.device:
    """The device of a rank."""
    if config.device == "cpu" or (config.device == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ModelConfigError("device 'cuda' was asked for, but torch sees no GPU here: use device='cpu'")
    return torch.device("cuda", group.rank % torch.cuda.device_count())


def scaled_length(rope: RopeSettings) -> int:
    """The context that a config's rope is made for."""
    factor = rope.parameters.get("factor") or 1.0
    if rope.kind in ("linear", "dynamic"):
        return int(rope.max_positions * factor)
    if rope.kind == "yarn":
        return max(rope.max_positions, int(rope.original_max_positions * factor))
    return rope.max_positions
