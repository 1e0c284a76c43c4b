"""Phi-3, 3.5 and 4: fused [Q; K; V] and [gate; up], a window on every layer, longrope, part of a head rotated."""

from __future__ import annotations

from phalanx.models.base import TransformerModel
from phalanx.models.container import LayerContainer
from phalanx.models.llama import LlamaOuter
from phalanx.models.parameters import (
    AttentionOutputParameter,
    FusedGatedMLPParameter,
    FusedQKVParameter,
    MLP2Parameter,
    NormParameter,
)
from phalanx.models.policy import InferencePolicy
from phalanx.models.rope import RopeSettings, rope_settings


class Phi3Layer(LayerContainer):
    attn_norm: NormParameter
    qkv: FusedQKVParameter
    attn_out: AttentionOutputParameter
    mlp_norm: NormParameter
    mlp_1: FusedGatedMLPParameter
    mlp_2: MLP2Parameter

    PARAM_MAPPING = {
        "input_layernorm.weight": "attn_norm.params",
        "self_attn.qkv_proj.weight": "qkv.params",
        "self_attn.o_proj.weight": "attn_out.params",
        "post_attention_layernorm.weight": "mlp_norm.params",
        "mlp.gate_up_proj.weight": "mlp_1.params",
        "mlp.down_proj.weight": "mlp_2.params",
    }


class Phi3Model(TransformerModel):
    @property
    def rope(self) -> RopeSettings:
        # Its first configs called longrope so.
        return rope_settings(self.config, self.head_dim, aliases={"su": "longrope", "yarn": "longrope"})

    def window(self, layer: int) -> int | None:
        return self.sliding_window


class Phi3Policy(InferencePolicy):
    model_types = ("phi3",)
    model_class = Phi3Model
    layer_container = Phi3Layer
    outer_container = LlamaOuter
