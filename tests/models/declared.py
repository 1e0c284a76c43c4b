"""Models as a user's package would declare them, one for every trait: no forward is written, steps only where they
differ. Defining them makes them known; `forget()` undoes it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from phalanx.models import POLICIES, InferenceParameter, InferencePolicy, LayerContainer, TransformerModel
from phalanx.models.llama import LlamaLayer, LlamaOuter, LlamaPolicy
from phalanx.models.parameters import (
    AttentionOutputParameter,
    EmbeddingParameter,
    GatedMLPParameter,
    HeadNormParameter,
    MegatronQKVParameter,
    MLP1Parameter,
    MLP2Parameter,
    NormParameter,
    PositionEmbeddingParameter,
    UnembedBiasParameter,
    UnembedParameter,
    UnfusedQKVParameter,
)
from phalanx.ops.batch import RaggedBatch

# -- parts that several share


class UngatedMLP(LayerContainer):
    """An MLP of two linears with biases."""

    mlp_1: MLP1Parameter
    mlp_1_bias: MLP1Parameter
    mlp_2: MLP2Parameter
    mlp_2_bias: MLP2Parameter

    PARAM_MAPPING = {
        "fc1.weight": "mlp_1.params",
        "fc1.bias": "mlp_1_bias.params",
        "fc2.weight": "mlp_2.params",
        "fc2.bias": "mlp_2_bias.params",
    }


class SplitQKV(LayerContainer):
    """Q, K and V apart, with biases."""

    qkv: UnfusedQKVParameter
    qkv_bias: UnfusedQKVParameter

    PARAM_MAPPING = {
        f"self_attn.{letter}_proj.{kind}": f"{target}.{letter}_params"
        for kind, target in (("weight", "qkv"), ("bias", "qkv_bias"))
        for letter in "qkv"
    }


class QKNorm(LayerContainer):
    """Norms of query and key heads."""

    q_norm: HeadNormParameter
    k_norm: HeadNormParameter

    PARAM_MAPPING = {"self_attn.q_norm.weight": "q_norm.params", "self_attn.k_norm.weight": "k_norm.params"}


class LayerNormModel(TransformerModel):
    """LayerNorm and an MLP without gate."""

    norm_type = "layer_norm"
    gated_mlp = False


# -- parallel residual with two norms, [q, k, v] of every head in one tensor, part of a head rotated


class NeoXLayer(UngatedMLP):
    attn_norm: NormParameter
    attn_norm_bias: NormParameter
    mlp_norm: NormParameter
    mlp_norm_bias: NormParameter
    qkv: MegatronQKVParameter
    qkv_bias: MegatronQKVParameter
    attn_out: AttentionOutputParameter
    attn_out_bias: AttentionOutputParameter

    PARAM_MAPPING = {
        "input_layernorm.weight": "attn_norm.params",
        "input_layernorm.bias": "attn_norm_bias.params",
        "post_attention_layernorm.weight": "mlp_norm.params",
        "post_attention_layernorm.bias": "mlp_norm_bias.params",
        "attention.query_key_value.weight": "qkv.params",
        "attention.query_key_value.bias": "qkv_bias.params",
        "attention.dense.weight": "attn_out.params",
        "attention.dense.bias": "attn_out_bias.params",
        "mlp.dense_h_to_4h.weight": "mlp_1.params",
        "mlp.dense_h_to_4h.bias": "mlp_1_bias.params",
        "mlp.dense_4h_to_h.weight": "mlp_2.params",
        "mlp.dense_4h_to_h.bias": "mlp_2_bias.params",
    }


class NeoXOuter(LayerContainer):
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


class NeoXModel(LayerNormModel):
    @property
    def parallel_residual(self) -> bool:
        return bool(self.config.use_parallel_residual)


class NeoXPolicy(InferencePolicy):
    model_types = ("toy_gpt_neox",)
    model_class = NeoXModel
    layer_container = NeoXLayer
    outer_container = NeoXOuter
    layer_prefix = "gpt_neox.layers"


# -- parallel residual with one norm, a head with a bias


class PhiLayer(SplitQKV, UngatedMLP):
    attn_norm: NormParameter
    attn_norm_bias: NormParameter
    attn_out: AttentionOutputParameter
    attn_out_bias: AttentionOutputParameter

    PARAM_MAPPING = {
        "input_layernorm.weight": "attn_norm.params",
        "input_layernorm.bias": "attn_norm_bias.params",
        "self_attn.dense.weight": "attn_out.params",
        "self_attn.dense.bias": "attn_out_bias.params",
        "mlp.fc1.weight": "mlp_1.params",
        "mlp.fc1.bias": "mlp_1_bias.params",
        "mlp.fc2.weight": "mlp_2.params",
        "mlp.fc2.bias": "mlp_2_bias.params",
    }


class PhiOuter(LlamaOuter):
    final_norm_bias: NormParameter
    word_unembed_bias: UnembedBiasParameter

    PARAM_MAPPING = {
        "model.norm.weight": None,
        "model.final_layernorm.weight": "final_norm.params",
        "model.final_layernorm.bias": "final_norm_bias.params",
        "lm_head.bias": "word_unembed_bias.params",
    }


class PhiModel(LayerNormModel):
    parallel_residual = True


class PhiPolicy(InferencePolicy):
    model_types = ("toy_phi",)
    model_class = PhiModel
    layer_container = PhiLayer
    outer_container = PhiOuter


# -- learned positions


class OPTLayer(SplitQKV, UngatedMLP):
    attn_norm: NormParameter
    attn_norm_bias: NormParameter
    attn_out: AttentionOutputParameter
    attn_out_bias: AttentionOutputParameter
    mlp_norm: NormParameter
    mlp_norm_bias: NormParameter

    PARAM_MAPPING = {
        "self_attn_layer_norm.weight": "attn_norm.params",
        "self_attn_layer_norm.bias": "attn_norm_bias.params",
        "self_attn.out_proj.weight": "attn_out.params",
        "self_attn.out_proj.bias": "attn_out_bias.params",
        "final_layer_norm.weight": "mlp_norm.params",
        "final_layer_norm.bias": "mlp_norm_bias.params",
    }


class OPTOuter(LayerContainer):
    word_emb: EmbeddingParameter
    pos_emb: PositionEmbeddingParameter
    final_norm: NormParameter
    final_norm_bias: NormParameter

    PARAM_MAPPING = {
        "model.decoder.embed_tokens.weight": "word_emb.params",
        "model.decoder.embed_positions.weight": "pos_emb.params",
        "model.decoder.final_layer_norm.weight": "final_norm.params",
        "model.decoder.final_layer_norm.bias": "final_norm_bias.params",
    }


class OPTModel(LayerNormModel):
    rope = None
    learned_positions = True
    position_offset = 2
    norm_eps = 1e-5

    @property
    def activation(self) -> str:
        return str(self.config.activation_function)

    @property
    def intermediate_size(self) -> int:
        return self.config.integer("ffn_dim")


class OPTPolicy(InferencePolicy):
    model_types = ("toy_opt",)
    model_class = OPTModel
    layer_container = OPTLayer
    outer_container = OPTOuter
    layer_prefix = "model.decoder.layers"


# -- norms of query and key heads


class Qwen3Layer(LlamaLayer, QKNorm):
    """Llama's, with the two norms."""


class Qwen3Model(TransformerModel):
    qk_norm = True


class Qwen3Policy(LlamaPolicy):
    model_types = ("toy_qwen3",)
    model_class = Qwen3Model
    layer_container = Qwen3Layer


# -- norms on what attention and MLP return


class Exaone4Layer(QKNorm):
    qkv: UnfusedQKVParameter
    attn_out: AttentionOutputParameter
    attn_post_norm: NormParameter
    mlp_1: GatedMLPParameter
    mlp_2: MLP2Parameter
    mlp_post_norm: NormParameter

    PARAM_MAPPING = {
        **{f"self_attn.{letter}_proj.weight": f"qkv.{letter}_params" for letter in "qkv"},
        "self_attn.o_proj.weight": "attn_out.params",
        "post_attention_layernorm.weight": "attn_post_norm.params",
        "mlp.gate_proj.weight": "mlp_1.gate_params",
        "mlp.up_proj.weight": "mlp_1.up_params",
        "mlp.down_proj.weight": "mlp_2.params",
        "post_feedforward_layernorm.weight": "mlp_post_norm.params",
    }


class Exaone4Model(Qwen3Model):
    norm_placement = "post"


class Exaone4Policy(InferencePolicy):
    model_types = ("toy_exaone4",)
    model_class = Exaone4Model
    layer_container = Exaone4Layer
    outer_container = LlamaOuter


# -- norms before and after, soft caps, windows, and two steps of its own


class Gemma2Layer(LlamaLayer):
    attn_post_norm: NormParameter
    mlp_post_norm: NormParameter

    PARAM_MAPPING = {
        "post_attention_layernorm.weight": "attn_post_norm.params",
        "pre_feedforward_layernorm.weight": "mlp_norm.params",
        "post_feedforward_layernorm.weight": "mlp_post_norm.params",
    }


class Gemma2Model(TransformerModel):
    norm_placement = "sandwich"

    @property
    def activation(self) -> str:
        return str(self.config.hidden_activation)

    @property
    def attention_scale(self) -> float:
        return self.config.number("query_pre_attn_scalar") ** -0.5

    @property
    def attention_soft_cap(self) -> float:
        return self.config.number("attn_logit_softcapping")

    @property
    def logit_soft_cap(self) -> float:
        return self.config.number("final_logit_softcapping")

    def window(self, layer: int) -> int | None:
        return int(self.config.sliding_window) if self.config.layer_types[layer] == "sliding_attention" else None

    def transform_norm_param(self, value: Any) -> InferenceParameter | None:
        served = super().transform_norm_param(value)
        if served is not None:
            served.data += 1  # its norms multiply by 1 + weight
        return served

    def forward_embed(self, batch: RaggedBatch) -> Tensor:
        hidden = super().forward_embed(batch)
        return hidden * torch.tensor(self.hidden_size**0.5, dtype=hidden.dtype)


class Gemma2Policy(LlamaPolicy):
    model_types = ("toy_gemma2",)
    model_class = Gemma2Model
    layer_container = Gemma2Layer


TOYS = {name: policy for name, policy in POLICIES.items() if name.startswith("toy_")}


def forget() -> None:
    """Takes the toys out of the registry, so that other tests see what a user would."""
    for name in TOYS:
        POLICIES.pop(name, None)


forget()
