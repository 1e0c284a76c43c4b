"""Qwen3-MoE: Qwen3 with experts in some layers, or in all, and a window on all layers or on none."""

from __future__ import annotations

from phalanx.models.llama import LlamaAttention, LlamaOuter
from phalanx.models.mixtral import FusedExpertsLayer
from phalanx.models.moe import MoEPolicy, MoETransformerModel
from phalanx.models.parameters import MoEGatedMLPParameter, MoEGateParameter, MoEMLP2Parameter
from phalanx.models.qwen3 import NormedHeads, Qwen3Layer


class ExpertsLayer(LlamaAttention):
    moe_gate: MoEGateParameter
    moe_mlp_1: MoEGatedMLPParameter
    moe_mlp_2: MoEMLP2Parameter

    PARAM_MAPPING = {
        "mlp.gate.weight": "moe_gate.params",
        "mlp.experts.*.gate_proj.weight": "moe_mlp_1.gate_experts",
        "mlp.experts.*.up_proj.weight": "moe_mlp_1.up_experts",
        "mlp.experts.*.down_proj.weight": "moe_mlp_2.experts",
    }


class Qwen3ExpertsLayer(ExpertsLayer, NormedHeads): ...


class Qwen3FusedExpertsLayer(FusedExpertsLayer, NormedHeads): ...


class Qwen3MoEModel(MoETransformerModel):
    qk_norm = True

    def window(self, layer: int) -> int | None:
        return self.sliding_window if self.config.boolean("use_sliding_window") else None


class Qwen3MoEPolicy(MoEPolicy):
    model_types = ("qwen3_moe",)
    model_class = Qwen3MoEModel
    layer_container = Qwen3Layer
    moe_container = Qwen3ExpertsLayer
    fused_container = Qwen3FusedExpertsLayer
    outer_container = LlamaOuter
