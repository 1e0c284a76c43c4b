"""GPT-NeoX and Pythia: LayerNorms, parallel residual with a norm each, part of a head rotated, [q, k, v] by head."""

from __future__ import annotations

from phalanx.models.base import TransformerModel
from phalanx.models.container import LayerContainer, with_biases
from phalanx.models.parameters import (
    AttentionOutputBiasParameter,
    AttentionOutputParameter,
    EmbeddingParameter,
    GQAMegatronQKVBiasParameter,
    GQAMegatronQKVParameter,
    MLP1Parameter,
    MLP2Parameter,
    NormParameter,
    UnembedParameter,
)
from phalanx.models.policy import InferencePolicy
from phalanx.models.rope import RopeSettings, rope_settings


class GPTNeoXLayer(LayerContainer):
    attn_norm: NormParameter
    attn_norm_bias: NormParameter
    qkv: GQAMegatronQKVParameter
    qkv_bias: GQAMegatronQKVBiasParameter
    attn_out: AttentionOutputParameter
    attn_out_bias: AttentionOutputBiasParameter
    mlp_norm: NormParameter
    mlp_norm_bias: NormParameter
    mlp_1: MLP1Parameter
    mlp_1_bias: MLP1Parameter
    mlp_2: MLP2Parameter
    mlp_2_bias: MLP2Parameter

    PARAM_MAPPING = with_biases(
        {
            "input_layernorm": "attn_norm",
            "attention.query_key_value": "qkv",
            "attention.dense": "attn_out",
            "post_attention_layernorm": "mlp_norm",
            "mlp.dense_h_to_4h": "mlp_1",
            "mlp.dense_4h_to_h": "mlp_2",
        }
    )


class GPTNeoXOuter(LayerContainer):
    word_emb: EmbeddingParameter
    final_norm: NormParameter
    final_norm_bias: NormParameter
    word_unembed: UnembedParameter

    PARAM_MAPPING = {
        "gpt_neox.embed_in.weight": "word_emb.params",
        "gpt_neox.final_layer_norm.weight": "final_norm.params",
        "gpt_neox.final_layer_norm.bias": "final_norm_bias.params",
        "embed_out.weight": "word_unembed.params",
    }


class GPTNeoXModel(TransformerModel):
    norm_type = "layer_norm"
    gated_mlp = False

    @property
    def parallel_residual(self) -> bool:
        return self.config.boolean("use_parallel_residual")

    @property
    def rope(self) -> RopeSettings:
        return rope_settings(self.config, self.head_dim, theta_key="rotary_emb_base", partial_key="rotary_pct")


class GPTNeoXPolicy(InferencePolicy):
    model_types = ("gpt_neox",)
    model_class = GPTNeoXModel
    layer_container = GPTNeoXLayer
    outer_container = GPTNeoXOuter
    layer_prefix = "gpt_neox.layers"
    unmapped = ("*.rotary_emb.inv_freq", "*.attention.bias", "*.attention.masked_bias")
