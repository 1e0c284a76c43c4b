"""StableLM: Llama with LayerNorms and part of a head rotated; optionally parallel residual, a norm for each head."""

from __future__ import annotations

import torch
from torch import Tensor

from phalanx.models.base import StepState, TransformerModel
from phalanx.models.container import LayerContainer
from phalanx.models.llama import LlamaOuter, LlamaPolicy
from phalanx.models.parameter import InferenceParameter, ParameterBase, ParamList
from phalanx.models.parameters import (
    AttentionOutputParameter,
    GatedMLPParameter,
    MLP2Parameter,
    NormParameter,
    UnfusedQKVBiasParameter,
    UnfusedQKVParameter,
)


class HeadNorms(ParameterBase):
    """The norm weights of the query heads or of the KV heads, one tensor a head."""

    def finalize(self) -> InferenceParameter | None:
        weights = torch.cat([weight[:] for weight in next(iter(self.values.values()))])
        return self.inference_model.transform_head_weight_param(weights, queries=self.name == "q_norm")

    def expected_shape(self, dependency: str, ndim: int) -> tuple[int, ...]:
        return (self.inference_model.head_dim,)


class QueryNorms(HeadNorms):
    heads: ParamList("num_heads")  # type: ignore[valid-type]


class KeyNorms(HeadNorms):
    heads: ParamList("num_kv_heads")  # type: ignore[valid-type]


class ParallelLayer(LayerContainer):
    attn_norm: NormParameter
    attn_norm_bias: NormParameter
    qkv: UnfusedQKVParameter
    qkv_bias: UnfusedQKVBiasParameter
    attn_out: AttentionOutputParameter
    mlp_1: GatedMLPParameter
    mlp_2: MLP2Parameter

    PARAM_MAPPING = {
        "input_layernorm.weight": "attn_norm.params",
        "input_layernorm.bias": "attn_norm_bias.params",
        **{f"self_attn.{part}_proj.weight": f"qkv.{part}_params" for part in "qkv"},
        **{f"self_attn.{part}_proj.bias": f"qkv_bias.{part}_params" for part in "qkv"},
        "self_attn.o_proj.weight": "attn_out.params",
        "mlp.gate_proj.weight": "mlp_1.gate_params",
        "mlp.up_proj.weight": "mlp_1.up_params",
        "mlp.down_proj.weight": "mlp_2.params",
    }


class SequentialLayer(ParallelLayer):
    mlp_norm: NormParameter
    mlp_norm_bias: NormParameter

    PARAM_MAPPING = {
        "post_attention_layernorm.weight": "mlp_norm.params",
        "post_attention_layernorm.bias": "mlp_norm_bias.params",
    }


class NormedHeads(LayerContainer):
    q_norm: QueryNorms
    k_norm: KeyNorms

    PARAM_MAPPING = {
        "self_attn.q_layernorm.norms.*.weight": "q_norm.heads",
        "self_attn.k_layernorm.norms.*.weight": "k_norm.heads",
    }


class NormedParallelLayer(ParallelLayer, NormedHeads): ...


class NormedSequentialLayer(SequentialLayer, NormedHeads): ...


class StableLMOuter(LlamaOuter):
    final_norm_bias: NormParameter

    PARAM_MAPPING = {"model.norm.bias": "final_norm_bias.params"}


class StableLMModel(TransformerModel):
    norm_type = "layer_norm"

    @property
    def qkv_bias(self) -> bool:
        return self.config.boolean("use_qkv_bias")

    @property
    def qk_norm(self) -> bool:
        return self.config.boolean("qk_layernorm")

    @property
    def parallel_residual(self) -> bool:
        return self.config.boolean("use_parallel_residual")

    def forward_heads(self, layer: int, state: StepState, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        if not self.qk_norm:
            return q, k
        weights = self.layers[layer].q_norm.data, self.layers[layer].k_norm.data
        q, k = (self.norm(x, None) * w.view(-1, self.head_dim) for x, w in zip((q, k), weights, strict=True))
        return q, k


class StableLMPolicy(LlamaPolicy):
    model_types = ("stablelm",)
    model_class = StableLMModel
    outer_container = StableLMOuter

    def make_layer_container(self, model: TransformerModel, layer: int) -> LayerContainer:
        if model.parallel_residual:
            return (NormedParallelLayer if model.qk_norm else ParallelLayer)(model)
        return (NormedSequentialLayer if model.qk_norm else SequentialLayer)(model)
