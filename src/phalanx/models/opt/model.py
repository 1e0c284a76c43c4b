"""OPT's traits, and its steps where embeddings have a width of their own or norms stand after the residual."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn.functional import embedding

from phalanx.layout.partition import Partition
from phalanx.models.base import StepState, TransformerModel, bias_of
from phalanx.models.layers import Embedding, Linear, Unembedding
from phalanx.models.parameter import InferenceParameter
from phalanx.models.traits import integer_of
from phalanx.ops.batch import RaggedBatch


class OPTModel(TransformerModel):
    norm_type = "layer_norm"
    norm_eps = 1e-5
    gated_mlp = False
    rope = None
    learned_positions = True
    position_offset = 2
    intermediate_size = integer_of("ffn_dim")

    @property
    def embedding_size(self) -> int:
        """Width of the embedding and the head."""
        narrow = self.config.get("word_embed_proj_dim")
        return self.hidden_size if narrow is None else self.config.integer("word_embed_proj_dim")

    @property
    def final_normed(self) -> bool:
        """Whether a norm stands after the last layer."""
        return self.norm_first and not self.config.boolean("_remove_final_layer_norm")

    @property
    def norm_first(self) -> bool:
        """Whether norms stand before attention and MLP, rather than after the sum with the residual."""
        return self.config.boolean("do_layer_norm_before")

    @property
    def projected(self) -> bool:
        """Whether the layers have another width than the embedding."""
        return self.embedding_size != self.hidden_size

    @property
    def activation(self) -> str:
        return str(self.config.activation_function)

    @property
    def qkv_bias(self) -> bool:
        return self.config.boolean("enable_bias")

    attn_out_bias = mlp_bias = qkv_bias

    @property
    def outer_parameters(self) -> frozenset[str]:
        return super().outer_parameters | {"project_in", "project_out"}

    def make_embedding_layer(self) -> Embedding:
        return Embedding(self.placement, self.vocab_size, self.embedding_size, self.tied_head)

    def make_unembedding_layer(self) -> Unembedding:
        return Unembedding(self.placement, self.vocab_size, self.embedding_size)

    def transform_projection_param(self, value: Any) -> InferenceParameter | None:
        """A weight [out, in] that every rank holds whole."""
        return self.projection(*value.shape).transform(value)

    def projection(self, out_features: int, in_features: int) -> Linear:
        """A linear that is not cut."""
        return Linear(self.placement, Partition.replicate(), in_features, out_features)

    def forward_embed(self, batch: RaggedBatch) -> Tensor:
        hidden = self.embed(batch.input_ids, self.outer.word_emb)
        if self.projected:
            hidden = self.projection(self.hidden_size, self.embedding_size)(hidden, self.outer.project_in)
        return hidden + embedding(batch.positions + self.position_offset, self.outer.pos_emb.data)

    def forward_layer(
        self, layer: int, hidden: Tensor, residual: Tensor | None, state: StepState
    ) -> tuple[Tensor, Tensor | None]:
        if self.norm_first:
            return super().forward_layer(layer, hidden, residual, state)
        p = self.layers[layer]
        attended = hidden + self.forward_attention(layer, hidden, state)
        hidden = self.norm(attended, p.attn_norm, bias_of(p, "attn_norm"))
        return self.norm(hidden + self.forward_mlp(layer, hidden), p.mlp_norm, bias_of(p, "mlp_norm")), None

    def forward_final(self, hidden: Tensor, residual: Tensor | None, rows: Tensor) -> Tensor:
        x = hidden[rows] if residual is None else hidden[rows] + residual[rows]
        if self.final_normed:
            x = self.norm(x, self.outer.final_norm, bias_of(self.outer, "final_norm"))
        if self.projected:
            x = self.projection(self.embedding_size, self.hidden_size)(x, self.outer.project_out)
        return x
