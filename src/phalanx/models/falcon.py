"""Falcon: 7B (multi-query, one norm for attention and MLP side by side), 40B and 180B (grouped, two norms), RW (as many
KV heads as query heads, one after the other, ALiBi), and their mixtures."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from phalanx.models.base import TransformerModel
from phalanx.models.container import LayerContainer, with_biases
from phalanx.models.parameters import (
    AttentionOutputBiasParameter,
    AttentionOutputParameter,
    EmbeddingParameter,
    GQAMegatronQKVBiasParameter,
    GQAMegatronQKVParameter,
    MLP1BiasParameter,
    MLP1Parameter,
    MLP2BiasParameter,
    MLP2Parameter,
    NormParameter,
    UnembedParameter,
)
from phalanx.models.policy import InferencePolicy
from phalanx.models.rope import RopeSettings


class FalconLayer(LayerContainer):
    """With one norm. [query heads, k, v] a KV head is the layout of all of them, that of one KV head included."""

    attn_norm: NormParameter
    attn_norm_bias: NormParameter
    qkv: GQAMegatronQKVParameter
    qkv_bias: GQAMegatronQKVBiasParameter
    attn_out: AttentionOutputParameter
    attn_out_bias: AttentionOutputBiasParameter
    mlp_1: MLP1Parameter
    mlp_1_bias: MLP1BiasParameter
    mlp_2: MLP2Parameter
    mlp_2_bias: MLP2BiasParameter

    PARAM_MAPPING = with_biases(
        {
            "input_layernorm": "attn_norm",
            "self_attention.query_key_value": "qkv",
            "self_attention.dense": "attn_out",
            "mlp.dense_h_to_4h": "mlp_1",
            "mlp.dense_4h_to_h": "mlp_2",
        }
    )


class SequentialLayer(FalconLayer):
    mlp_norm: NormParameter
    mlp_norm_bias: NormParameter

    PARAM_MAPPING = with_biases({"post_attention_layernorm": "mlp_norm"})


class TwoNormsLayer(FalconLayer):
    mlp_norm: NormParameter
    mlp_norm_bias: NormParameter

    PARAM_MAPPING = with_biases({"ln_attn": "attn_norm", "ln_mlp": "mlp_norm"})


class FalconOuter(LayerContainer):
    word_emb: EmbeddingParameter
    final_norm: NormParameter
    final_norm_bias: NormParameter
    word_unembed: UnembedParameter

    PARAM_MAPPING = {
        "transformer.word_embeddings.weight": "word_emb.params",
        "transformer.ln_f.weight": "final_norm.params",
        "transformer.ln_f.bias": "final_norm_bias.params",
        "lm_head.weight": "word_unembed.params",
    }


class FalconModel(TransformerModel):
    norm_type = "layer_norm"
    gated_mlp = False

    @property
    def grouped(self) -> bool:
        """The architecture of 40B."""
        return self.config.boolean("new_decoder_architecture")

    @property
    def num_kv_heads(self) -> int:
        if self.config.boolean("multi_query") and not self.grouped:
            return 1
        return self.num_heads if self.config.get("num_kv_heads") is None else self.config.integer("num_kv_heads")

    @property
    def intermediate_size(self) -> int:
        given = self.config.get("ffn_hidden_size")
        return 4 * self.hidden_size if given is None else self.config.integer("ffn_hidden_size")

    @property
    def norm_eps(self) -> float:
        return self.config.number("layer_norm_epsilon")

    @property
    def activation(self) -> str:
        return str(self.config.activation)

    @property
    def qkv_bias(self) -> bool:
        return self.config.boolean("bias")

    attn_out_bias = mlp_bias = qkv_bias

    @property
    def parallel_residual(self) -> bool:
        return self.grouped or self.config.boolean("parallel_attn")

    @property
    def two_norms(self) -> bool:
        """Attention and MLP side by side with a norm each."""
        count = self.config.get("num_ln_in_parallel_attn")
        return self.grouped and count in (None, 2)

    @property
    def rope(self) -> RopeSettings | None:
        return None if self.config.boolean("alibi") else super().rope

    @property
    def key_bias(self) -> Tensor | None:
        if not self.config.boolean("alibi"):
            return None
        # As it was trained: slopes and their products with positions are rounded to bfloat16, and scaled like scores.
        slopes = torch.tensor(alibi_slopes(self.num_heads)).bfloat16()
        return (slopes[:, None] * torch.arange(self.max_sequence_length)).float() / math.sqrt(self.head_dim)


def alibi_slopes(num_heads: int) -> list[float]:
    """The slope of each head, by arXiv:2108.12409: a geometric series for the greatest power of two that is not above
    ``num_heads``, and every second term of the series for twice as many for the rest."""
    power = 1 << (num_heads.bit_length() - 1)
    series = [2.0 ** (-8 * (i + 1) / power) for i in range(power)]
    between = [2.0 ** (-8 * (i + 1) / (2 * power)) for i in range(0, 2 * (num_heads - power), 2)]
    return series + between


class FalconPolicy(InferencePolicy):
    model_types = ("falcon",)
    model_class = FalconModel
    outer_container = FalconOuter
    layer_prefix = "transformer.h"

    def make_layer_container(self, model: TransformerModel, layer: int) -> LayerContainer:
        if not model.parallel_residual:
            return SequentialLayer(model)
        return (TwoNormsLayer if isinstance(model, FalconModel) and model.two_norms else FalconLayer)(model)
