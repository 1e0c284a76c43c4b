"""Qwen's tensors."""

from __future__ import annotations

from phalanx.models.container import LayerContainer
from phalanx.models.parameters import (
    AttentionOutputBiasParameter,
    AttentionOutputParameter,
    EmbeddingParameter,
    FusedQKVParameter,
    GatedMLPBiasParameter,
    GatedMLPParameter,
    MLP2BiasParameter,
    MLP2Parameter,
    NormParameter,
    UnembedParameter,
)


class QwenLayer(LayerContainer):
    attn_norm: NormParameter
    qkv: FusedQKVParameter
    qkv_bias: FusedQKVParameter
    attn_out: AttentionOutputParameter
    attn_out_bias: AttentionOutputBiasParameter
    mlp_norm: NormParameter
    mlp_1: GatedMLPParameter
    mlp_1_bias: GatedMLPBiasParameter
    mlp_2: MLP2Parameter
    mlp_2_bias: MLP2BiasParameter

    PARAM_MAPPING = {
        "ln_1.weight": "attn_norm.params",
        "attn.c_attn.weight": "qkv.params",
        "attn.c_attn.bias": "qkv_bias.params",
        "attn.c_proj.weight": "attn_out.params",
        "attn.c_proj.bias": "attn_out_bias.params",
        "ln_2.weight": "mlp_norm.params",
        "mlp.w2.weight": "mlp_1.gate_params",
        "mlp.w1.weight": "mlp_1.up_params",
        "mlp.w2.bias": "mlp_1_bias.gate_params",
        "mlp.w1.bias": "mlp_1_bias.up_params",
        "mlp.c_proj.weight": "mlp_2.params",
        "mlp.c_proj.bias": "mlp_2_bias.params",
    }


class QwenOuter(LayerContainer):
    word_emb: EmbeddingParameter
    final_norm: NormParameter
    word_unembed: UnembedParameter

    PARAM_MAPPING = {
        "transformer.wte.weight": "word_emb.params",
        "transformer.ln_f.weight": "final_norm.params",
        "lm_head.weight": "word_unembed.params",
    }
