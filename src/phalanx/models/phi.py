"""Phi 1, 1.5 and 2: one LayerNorm a layer for attention and MLP side by side, biases everywhere, partial rope."""

from __future__ import annotations

from phalanx.models.base import TransformerModel
from phalanx.models.container import LayerContainer, with_biases
from phalanx.models.parameters import (
    AttentionOutputParameter,
    EmbeddingParameter,
    HeadNormParameter,
    MLP1Parameter,
    MLP2Parameter,
    NormParameter,
    UnembedBiasParameter,
    UnembedParameter,
    UnfusedQKVParameter,
)
from phalanx.models.policy import InferencePolicy


class PhiLayer(LayerContainer):
    attn_norm: NormParameter
    attn_norm_bias: NormParameter
    qkv: UnfusedQKVParameter
    qkv_bias: UnfusedQKVParameter
    attn_out: AttentionOutputParameter
    attn_out_bias: AttentionOutputParameter
    mlp_1: MLP1Parameter
    mlp_1_bias: MLP1Parameter
    mlp_2: MLP2Parameter
    mlp_2_bias: MLP2Parameter

    PARAM_MAPPING = {
        "input_layernorm.weight": "attn_norm.params",
        "input_layernorm.bias": "attn_norm_bias.params",
        **{f"self_attn.{part}_proj.weight": f"qkv.{part}_params" for part in "qkv"},
        **{f"self_attn.{part}_proj.bias": f"qkv_bias.{part}_params" for part in "qkv"},
        **with_biases(
            {
                "self_attn.dense": "attn_out",
                "mlp.fc1": "mlp_1",
                "mlp.fc2": "mlp_2",
            }
        ),
    }


class PhiNormedHeadsLayer(PhiLayer):
    q_norm: HeadNormParameter
    q_norm_bias: HeadNormParameter
    k_norm: HeadNormParameter
    k_norm_bias: HeadNormParameter

    PARAM_MAPPING = with_biases({"self_attn.q_layernorm": "q_norm", "self_attn.k_layernorm": "k_norm"})


class PhiOuter(LayerContainer):
    word_emb: EmbeddingParameter
    final_norm: NormParameter
    final_norm_bias: NormParameter
    word_unembed: UnembedParameter
    word_unembed_bias: UnembedBiasParameter

    PARAM_MAPPING = {
        "model.embed_tokens.weight": "word_emb.params",
        **with_biases({"model.final_layernorm": "final_norm", "lm_head": "word_unembed"}),
    }


class PhiModel(TransformerModel):
    norm_type = "layer_norm"
    gated_mlp = False
    parallel_residual = True

    @property
    def qk_norm(self) -> bool:
        return self.config.boolean("qk_layernorm")


class PhiPolicy(InferencePolicy):
    model_types = ("phi",)
    model_class = PhiModel
    outer_container = PhiOuter

    def make_layer_container(self, model: TransformerModel, layer: int) -> LayerContainer:
        return (PhiNormedHeadsLayer if model.qk_norm else PhiLayer)(model)
