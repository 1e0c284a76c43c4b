"""Llama (2, 3, 3.x) and everything with its config: MHA, GQA or MQA, biases, tied head, all kinds of rope."""

from __future__ import annotations

from phalanx.models.base import TransformerModel
from phalanx.models.container import LayerContainer
from phalanx.models.parameters import (
    AttentionOutputBiasParameter,
    AttentionOutputParameter,
    EmbeddingParameter,
    GatedMLPBiasParameter,
    GatedMLPParameter,
    MLP2BiasParameter,
    MLP2Parameter,
    NormParameter,
    UnembedParameter,
    UnfusedQKVBiasParameter,
    UnfusedQKVParameter,
)
from phalanx.models.policy import InferencePolicy


class LlamaAttention(LayerContainer):
    """A layer without its MLP."""

    attn_norm: NormParameter
    qkv: UnfusedQKVParameter
    qkv_bias: UnfusedQKVBiasParameter
    attn_out: AttentionOutputParameter
    attn_out_bias: AttentionOutputBiasParameter
    mlp_norm: NormParameter

    PARAM_MAPPING = {
        "input_layernorm.weight": "attn_norm.params",
        "self_attn.q_proj.weight": "qkv.q_params",
        "self_attn.k_proj.weight": "qkv.k_params",
        "self_attn.v_proj.weight": "qkv.v_params",
        "self_attn.q_proj.bias": "qkv_bias.q_params",
        "self_attn.k_proj.bias": "qkv_bias.k_params",
        "self_attn.v_proj.bias": "qkv_bias.v_params",
        "self_attn.o_proj.weight": "attn_out.params",
        "self_attn.o_proj.bias": "attn_out_bias.params",
        "post_attention_layernorm.weight": "mlp_norm.params",
    }


class LlamaLayer(LlamaAttention):
    mlp_1: GatedMLPParameter
    mlp_1_bias: GatedMLPBiasParameter
    mlp_2: MLP2Parameter
    mlp_2_bias: MLP2BiasParameter

    PARAM_MAPPING = {
        "mlp.gate_proj.weight": "mlp_1.gate_params",
        "mlp.up_proj.weight": "mlp_1.up_params",
        "mlp.gate_proj.bias": "mlp_1_bias.gate_params",
        "mlp.up_proj.bias": "mlp_1_bias.up_params",
        "mlp.down_proj.weight": "mlp_2.params",
        "mlp.down_proj.bias": "mlp_2_bias.params",
    }


class LlamaOuter(LayerContainer):
    word_emb: EmbeddingParameter
    final_norm: NormParameter
    word_unembed: UnembedParameter

    PARAM_MAPPING = {
        "model.embed_tokens.weight": "word_emb.params",
        "model.norm.weight": "final_norm.params",
        "lm_head.weight": "word_unembed.params",
    }


class LlamaPolicy(InferencePolicy):
    model_types = ("llama",)
    model_class = TransformerModel
    layer_container = LlamaLayer
    outer_container = LlamaOuter
