"""EXAONE 4: norms on what attention and MLP return, norms of query and key heads; where some layers have a window, the
global ones have no rope."""

from __future__ import annotations

from phalanx.models.base import TransformerModel
from phalanx.models.container import LayerContainer
from phalanx.models.layer_types import FULL, SLIDING, LayerTypes
from phalanx.models.llama import LlamaOuter
from phalanx.models.parameters import (
    AttentionOutputParameter,
    GatedMLPParameter,
    HeadNormParameter,
    MLP2Parameter,
    NormParameter,
    UnfusedQKVParameter,
)
from phalanx.models.policy import InferencePolicy
from phalanx.models.rope import RopeSettings


class Exaone4Layer(LayerContainer):
    qkv: UnfusedQKVParameter
    q_norm: HeadNormParameter
    k_norm: HeadNormParameter
    attn_out: AttentionOutputParameter
    attn_post_norm: NormParameter
    mlp_1: GatedMLPParameter
    mlp_2: MLP2Parameter
    mlp_post_norm: NormParameter

    PARAM_MAPPING = {
        **{f"self_attn.{part}_proj.weight": f"qkv.{part}_params" for part in "qkv"},
        "self_attn.q_norm.weight": "q_norm.params",
        "self_attn.k_norm.weight": "k_norm.params",
        "self_attn.o_proj.weight": "attn_out.params",
        "post_attention_layernorm.weight": "attn_post_norm.params",
        "mlp.gate_proj.weight": "mlp_1.gate_params",
        "mlp.up_proj.weight": "mlp_1.up_params",
        "mlp.down_proj.weight": "mlp_2.params",
        "post_feedforward_layernorm.weight": "mlp_post_norm.params",
    }


class Exaone4Model(LayerTypes, TransformerModel):
    norm_placement = "post"
    qk_norm = True

    def layer_type(self, layer: int) -> str:
        pattern = self.config.get("sliding_window_pattern")
        if self.sliding_window is None or not pattern:
            return FULL
        if isinstance(pattern, str):  # "LLLG"
            last = layer == self.num_layers - 1
            return SLIDING if pattern[layer % len(pattern)] == "L" and not last else FULL
        return SLIDING if (layer + 1) % pattern else FULL

    def rope_of(self, layer: int) -> RopeSettings | None:
        return self.rope if self.sliding_window is None or self.layer_types[layer] == SLIDING else None


class Exaone4Policy(InferencePolicy):
    model_types = ("exaone4",)
    model_class = Exaone4Model
    layer_container = Exaone4Layer
    outer_container = LlamaOuter
