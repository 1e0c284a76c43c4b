"""Mixtral: Llama with a window, and with experts in every layer."""

from __future__ import annotations

from phalanx.models.llama import LlamaAttention, LlamaLayer, LlamaOuter
from phalanx.models.moe import MoEPolicy, MoETransformerModel
from phalanx.models.parameters import (
    FusedMoEGatedMLPParameter,
    FusedMoEMLP2Parameter,
    MoEGatedMLPParameter,
    MoEGateParameter,
    MoEMLP2Parameter,
)
from phalanx.models.traits import integer_of


class MixtralLayer(LlamaAttention):
    moe_gate: MoEGateParameter
    moe_mlp_1: MoEGatedMLPParameter
    moe_mlp_2: MoEMLP2Parameter

    PARAM_MAPPING = {
        "block_sparse_moe.gate.weight": "moe_gate.params",
        "block_sparse_moe.experts.*.w1.weight": "moe_mlp_1.gate_experts",
        "block_sparse_moe.experts.*.w3.weight": "moe_mlp_1.up_experts",
        "block_sparse_moe.experts.*.w2.weight": "moe_mlp_2.experts",
    }


class FusedExpertsLayer(LlamaAttention):
    moe_gate: MoEGateParameter
    moe_mlp_1: FusedMoEGatedMLPParameter
    moe_mlp_2: FusedMoEMLP2Parameter

    PARAM_MAPPING = {
        "mlp.gate.weight": "moe_gate.params",
        "mlp.experts.gate_up_proj": "moe_mlp_1.params",
        "mlp.experts.down_proj": "moe_mlp_2.params",
    }


class MixtralModel(MoETransformerModel):
    normalize_expert_weights = True
    expert_intermediate_size = integer_of("intermediate_size")

    def window(self, layer: int) -> int | None:
        return self.sliding_window


class MixtralPolicy(MoEPolicy):
    model_types = ("mixtral",)
    model_class = MixtralModel
    layer_container = LlamaLayer
    moe_container = MixtralLayer
    fused_container = FusedExpertsLayer
    outer_container = LlamaOuter
