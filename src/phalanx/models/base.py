"""TransformerModel: declared traits become modules, and a ragged forward over a blocked KV cache.

Shapes: T tokens of all sequences of a step, R rows whose logits are wanted; hidden states are [T, hidden_size].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import embedding

from phalanx.config import EngineConfig, parse_dtype
from phalanx.distributed.group import Group
from phalanx.layout.partition import Block, Partition, attention_blocks
from phalanx.models.container import LayerContainer
from phalanx.models.hf_config import HFConfig
from phalanx.models.kv_spec import BlockSource, KVCacheSpec, KVGroup, SequenceState, kv_groups
from phalanx.models.late_sums import set_late_sums, sums_may_be_late
from phalanx.models.layers import Attention, Embedding, Linear, Norm, Unembedding, split_sizes
from phalanx.models.parameter import DeclarationError, InferenceParameter
from phalanx.models.placement import Placement, device_of
from phalanx.models.rope import RopeSettings, RotaryEmbedding
from phalanx.models.traits import Traits
from phalanx.ops.batch import RaggedBatch


@dataclass(frozen=True)
class StepState:
    """What the layers of one forward share: the batch, and each layer's rotary angles (None for one without)."""

    batch: RaggedBatch
    cos_sin: Sequence[tuple[Tensor, Tensor] | None]


class TransformerModel(Traits):
    """A decoder-only Transformer. A family overrides the traits that its config spells otherwise, and only where it
    computes differently a ``make_*`` hook or a step of the forward.

    Args:
        config: the Hugging Face config.
        engine_config: dtype, device, forced back ends, block size.
        group: the tensor-parallel group.

    Raises:
        ModelConfigError, ValueError: something in the config is not supported, by name.
    """

    def __init__(self, config: HFConfig, engine_config: EngineConfig, group: Group) -> None:
        super().__init__(config)
        self.engine_config = engine_config
        self.group = group
        self.device = device_of(engine_config, group)
        self.dtype = self._dtype()
        self.check_traits()
        self.placement = Placement.of(engine_config, group, self.device, self.dtype, self.hidden_size)
        self.norm = self.make_norm_layer()
        self.qkv = self.make_qkv_layer()
        self.attention = [self.make_attn_layer(layer) for layer in range(self.num_layers)]
        self.attn_out = self.make_attn_out_layer()
        self.mlp_1 = self.make_mlp_1_layer()
        self.mlp_2 = self.make_mlp_2_layer()
        self.embed = self.make_embedding_layer()
        self.unembed = self.make_unembedding_layer()
        self.activate = self.placement.op("gated_activation" if self.gated_mlp else "activation")
        # What products may apply themselves.
        self._gate = self.activate if self.gated_mlp and self.placement.fuses_gates else None
        self.rotary = self._rotaries()
        steps = type(self).forward_heads is TransformerModel.forward_heads
        self._norms_heads = steps and self.qk_norm and self.norm_type == "rms_norm"
        if sums_may_be_late(self, TransformerModel):
            set_late_sums(self, True)
        self.layers: list[Any] = []
        self.outer: Any = None
        self._kv: list[tuple[Tensor, Tensor]] = []

    # -- hooks: the modules

    def make_norm_layer(self) -> Norm:
        return Norm(self.placement, self.norm_type, self.norm_eps, self.norm_offset)

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
            self.local_key_bias,
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

    def make_rotary(self, rope: RopeSettings) -> RotaryEmbedding:
        return RotaryEmbedding(rope, self.device)

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

    def transform_embedding_param(self, value: Any) -> InferenceParameter | None:
        return self.embed.transform(value)

    def transform_position_param(self, value: Any) -> InferenceParameter | None:
        """The table of learned positions, whole on every rank."""
        return InferenceParameter(self.placement.cut(value, Partition.replicate()))

    def transform_unembed_param(self, value: Any) -> InferenceParameter | None:
        """The head's weight [vocab, hidden] or bias [vocab]; None for a tied head, which is found at the embedding."""
        return None if value is None else self.unembed.transform(value)

    def transform_norm_param(self, value: Any) -> InferenceParameter | None:
        return self.norm.transform(value)

    def transform_norm_bias_param(self, value: Any) -> InferenceParameter | None:
        """A norm's bias, to which no ``norm_offset`` is added."""
        return None if value is None else InferenceParameter(self.placement.cut(value, Partition.replicate()))

    def transform_head_weight_param(self, value: Any, queries: bool) -> InferenceParameter | None:
        """A vector with ``head_dim`` numbers for every query head (or every KV head): those of this rank's heads."""
        block = attention_blocks(self.num_heads, self.num_kv_heads, self.head_dim)[0 if queries else 1]
        return InferenceParameter(self.placement.cut(value, Partition.column((block,))))

    def transform_inv_freq_param(self, value: Any) -> InferenceParameter | None:
        """Inverse frequencies of rope: float32 whatever the model's dtype, for they are multiplied by positions."""
        return InferenceParameter(self.placement.cut(value, Partition.replicate(), torch.float32))

    def set_parameters(self, transformer: Sequence[LayerContainer], non_transformer: LayerContainer | None) -> None:
        """Takes the filled containers.

        Raises:
            DeclarationError: a container holds a parameter that no step of the forward reads.
        """
        for layer in transformer:
            self._check_read(layer, self.layer_parameters, "layer_parameters")
        if non_transformer is not None:
            self._check_read(non_transformer, self.outer_parameters, "outer_parameters")
        self.layers = list(transformer)
        self.outer = non_transformer

    def _check_read(self, container: LayerContainer, names: frozenset[str], trait: str) -> None:
        read = names | {f"{name}_bias" for name in names if self.reads_bias(name)}
        unread = [name for name in container.parameters if name not in read]
        if unread:
            raise DeclarationError(
                f"{type(container).__name__} has {', '.join(unread)}, which {type(self).__name__} never reads; it "
                f"reads {', '.join(sorted(read))}. Correct the name or the trait that makes it read, or add it to "
                f"`{trait}` where a step of your own reads it"
            )

    # -- hooks: the KV cache

    def kv_cache_spec(self, layer: int) -> KVCacheSpec:
        """What a layer keeps of a token on this rank."""
        return KVCacheSpec(self.local_heads[1], self.head_dim, self.placement.kv_dtype, self.window(layer))

    @cached_property
    def kv_groups(self) -> list[KVGroup]:
        """Layers that share a block table."""
        return kv_groups([self.kv_cache_spec(layer) for layer in range(self.num_layers)])

    @cached_property
    def kv_group_of(self) -> dict[int, int]:
        """Layer -> index of its KV group."""
        return {layer: index for index, group in enumerate(self.kv_groups) for layer in group.layers}

    def get_kv_requirements(self, sequence: SequenceState, max_new_tokens: int, max_new_blocks: int) -> tuple[int, int]:
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

    def held_parameters(self) -> list[tuple[int, int]]:
        """(elements, bytes) of every parameter on this rank, a tied one once."""
        containers = [*self.layers, *([self.outer] if self.outer is not None else [])]
        parameters = [p for container in containers for p in container.finalized().values() if p is not None]
        return [(prod(p.shape), p.nbytes) for p in parameters]

    def release(self) -> None:
        """Lets go of parameters and caches; the model computes no more."""
        self.layers, self.outer, self._kv = [], None, []

    # -- the forward

    def prepare_batch(self, batch: RaggedBatch) -> StepState:
        """What the layers share, computed once a forward: the rotary angles."""
        kinds = {rotary for rotary in self.rotary if rotary is not None}
        angles = {rotary: rotary.cos_sin(batch.positions, batch.rope_lens) for rotary in kinds}
        return StepState(batch, [None if rotary is None else angles[rotary] for rotary in self.rotary])

    @torch.inference_mode()
    def forward(self, batch: RaggedBatch, layers: range | None = None) -> Tensor:
        """float32 logits [R, vocab_size] of ``batch.logits_indices``, equal on every rank.

        ``layers`` runs some layers only (to measure memory).
        """
        return self.unembed.gather(self.forward_local(batch, layers))

    def forward_local(self, batch: RaggedBatch, layers: range | None = None) -> Tensor:
        """The part of the logits that is this rank's: float32 [R, vocab of this rank]."""
        return self.forward_unembed(*self.forward_layers(batch, layers), batch)

    @torch.inference_mode()
    def forward_with_states(self, batch: RaggedBatch, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The logits of ``forward``, and the hidden states [len(rows), hidden] of these rows of all T, final-normed."""
        hidden, residual = self.forward_layers(batch)
        logits = self.unembed.gather(self.forward_unembed(hidden, residual, batch))
        return logits, self.forward_final(hidden, residual, rows)

    def forward_layers(self, batch: RaggedBatch, layers: range | None = None) -> tuple[Tensor, Tensor | None]:
        """All layers, or some: the last one's output, and the residual that is still to be added to it."""
        state = self.prepare_batch(batch)
        hidden, residual = self.forward_embed(batch), None
        for layer in layers if layers is not None else range(self.num_layers):
            hidden, residual = self.forward_layer(layer, hidden, residual, state)
        return hidden, residual

    def forward_embed(self, batch: RaggedBatch) -> Tensor:
        """Embeddings [T, hidden] of the batch's ids."""
        hidden = self.embed(batch.input_ids, self.outer.word_emb)
        if self.embedding_scale != 1:
            hidden = hidden * torch.tensor(self.embedding_scale, dtype=hidden.dtype).item()
        if self.learned_positions:
            hidden = hidden + embedding(batch.positions + self.position_offset, self.outer.pos_emb.data)
        return hidden

    def forward_layer(
        self, layer: int, hidden: Tensor, residual: Tensor | None, state: StepState
    ) -> tuple[Tensor, Tensor | None]:
        """The layer's output and the residual that is still to be added to it."""
        parameters = self.layers[layer]
        hidden, residual = self._norm_before(hidden, residual, parameters, "attn_norm")
        attended = self._norm_after(self.forward_attention(layer, hidden, state), parameters, "attn_post_norm")
        if self.parallel_residual:
            if "mlp_norm" in parameters.parameters:
                hidden = self.norm(residual, parameters.mlp_norm, bias_of(parameters, "mlp_norm"))
            return attended + self._norm_after(self.forward_mlp(layer, hidden), parameters, "mlp_post_norm"), residual
        hidden, residual = self._norm_before(attended, residual, parameters, "mlp_norm")
        return self._norm_after(self.forward_mlp(layer, hidden), parameters, "mlp_post_norm"), residual

    def forward_attention(self, layer: int, hidden: Tensor, state: StepState) -> Tensor:
        """hidden [T, hidden], normed -> [T, hidden], not yet added to the residual."""
        parameters = self.layers[layer]
        qkv = self.qkv(hidden, parameters.qkv, bias_of(parameters, "qkv"))
        attention, angles, group = self.attention[layer], state.cos_sin[layer], self.kv_group_of[layer]
        if self._norms_heads and attention.fuses_norms:
            norms = {"q_norm": parameters.q_norm.data, "k_norm": parameters.k_norm.data, "norm_eps": self.norm_eps}
            out = attention(qkv, self._kv[layer], state.batch, group, angles, None, norms)
        else:
            before_rope = partial(self.forward_heads, layer, state)
            out = attention(qkv, self._kv[layer], state.batch, group, angles, before_rope)
        return self.attn_out(out, parameters.attn_out, bias_of(parameters, "attn_out"))

    def forward_heads(self, layer: int, state: StepState, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys of this rank before rope, [T, heads, head_dim] each: normed where ``qk_norm`` says so."""
        if not self.qk_norm:
            return q, k
        p = self.layers[layer]
        return self.norm(q, p.q_norm, bias_of(p, "q_norm")), self.norm(k, p.k_norm, bias_of(p, "k_norm"))

    def forward_mlp(self, layer: int, hidden: Tensor) -> Tensor:
        """hidden [T, hidden], normed -> [T, hidden], not yet added to the residual."""
        parameters = self.layers[layer]
        bias, inner = bias_of(parameters, "mlp_1"), None
        # What a family puts in the place of either must come between.
        if self.activate is self._gate and type(self.mlp_1) is Linear:
            inner = self.mlp_1.gated(hidden, parameters.mlp_1, bias, self.activation)
        if inner is None:
            inner = self.activate(self.mlp_1(hidden, parameters.mlp_1, bias), self.activation)
        return self.mlp_2(inner, parameters.mlp_2, bias_of(parameters, "mlp_2"))

    def forward_unembed(self, hidden: Tensor, residual: Tensor | None, batch: RaggedBatch) -> Tensor:
        """Final norm and head, of the wanted rows only: float32 [R, vocab of this rank]."""
        x = self.forward_final(hidden, residual, batch.logits_indices)
        head = self.outer.word_emb if self.tied_head else self.outer.word_unembed
        logits = self.unembed(x, head, bias_of(self.outer, "word_unembed"))
        cap = self.logit_soft_cap
        return logits if cap is None else torch.tanh(logits / cap) * cap

    def forward_final(self, hidden: Tensor, residual: Tensor | None, rows: Tensor) -> Tensor:
        """Final norm of some of the T rows: what the head reads."""
        picked = None if residual is None else residual[rows]
        return self.norm.add(hidden[rows], picked, self.outer.final_norm, bias_of(self.outer, "final_norm"))[0]

    def _norm_before(
        self, hidden: Tensor, residual: Tensor | None, parameters: Any, name: str
    ) -> tuple[Tensor, Tensor]:
        """What attention or MLP reads, and the new residual."""
        if self.norm_placement == "post":
            total = hidden if residual is None else hidden + residual
            return total, total
        return self.norm.add(hidden, residual, getattr(parameters, name), bias_of(parameters, name))

    def _norm_after(self, out: Tensor, parameters: Any, name: str) -> Tensor:
        if self.norm_placement == "pre":
            return out
        return self.norm(out, getattr(parameters, name), bias_of(parameters, name))

    # -- derived

    @cached_property
    def local_heads(self) -> tuple[int, int]:
        """Query and KV heads of this rank."""
        query, key, _ = split_sizes(attention_blocks(self.num_heads, self.num_kv_heads, self.head_dim), self.group)
        return query // self.head_dim, key // self.head_dim

    def _rotaries(self) -> list[RotaryEmbedding | None]:
        """Each layer's rope, one object for layers whose settings are equal."""
        settings = [self.rope_of(layer) for layer in range(self.num_layers)]
        firsts = [settings.index(rope) for rope in settings]
        made = {first: self.make_rotary(rope) for first, rope in enumerate(settings) if rope and firsts[first] == first}
        return [made.get(first) for first in firsts]

    @cached_property
    def local_key_bias(self) -> Tensor | None:
        """The trait ``key_bias`` for the query heads of this rank."""
        whole, rows = self.key_bias, attention_blocks(self.num_heads, self.num_kv_heads, 1)[:1]
        return None if whole is None else self.placement.cut(whole, Partition.column(rows), torch.float32)

    def _dtype(self) -> torch.dtype:
        if self.engine_config.dtype == "auto":
            return self.config.dtype or torch.float32
        return parse_dtype(self.engine_config.dtype)


def bias_of(parameters: Any, name: str) -> InferenceParameter | None:
    """The bias that goes with a parameter, by the kit's naming: ``<name>_bias``; None where there is none."""
    return getattr(parameters, f"{name}_bias", None)
