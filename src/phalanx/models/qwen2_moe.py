"""Qwen2-MoE (and 1.5): Qwen2 with experts in some layers, or in all, and a shared expert beside them."""

from __future__ import annotations

from phalanx.models.container import LayerContainer
from phalanx.models.layer_types import FULL, SLIDING
from phalanx.models.llama import LlamaLayer, LlamaOuter
from phalanx.models.mixtral import FusedExpertsLayer
from phalanx.models.moe import MoEPolicy, MoETransformerModel
from phalanx.models.parameters import SharedGatedMLPParameter, SharedGateParameter, SharedMLP2Parameter
from phalanx.models.qwen2 import QwenLayerTypes
from phalanx.models.qwen3_moe import ExpertsLayer
from phalanx.models.traits import integer_of


class SharedExpert(LayerContainer):
    shared_gate: SharedGateParameter
    shared_mlp_1: SharedGatedMLPParameter
    shared_mlp_2: SharedMLP2Parameter

    PARAM_MAPPING = {
        "mlp.shared_expert_gate.weight": "shared_gate.params",
        "mlp.shared_expert.gate_proj.weight": "shared_mlp_1.gate_params",
        "mlp.shared_expert.up_proj.weight": "shared_mlp_1.up_params",
        "mlp.shared_expert.down_proj.weight": "shared_mlp_2.params",
    }


class Qwen2ExpertsLayer(ExpertsLayer, SharedExpert): ...


class Qwen2FusedExpertsLayer(FusedExpertsLayer, SharedExpert): ...


class Qwen2MoEModel(QwenLayerTypes, MoETransformerModel):
    shared_expert_size = integer_of("shared_expert_intermediate_size")

    @property
    def qkv_bias(self) -> bool:
        return self.config.get("qkv_bias") is None or self.config.boolean("qkv_bias")

    def layer_type(self, layer: int) -> str:
        # Every other layer, and those below `max_window_layers`: not as in Qwen2.
        windowed = layer % 2 == 0 and layer < self.config.integer("max_window_layers")
        return SLIDING if self.sliding_window and windowed else FULL


class Qwen2MoEPolicy(MoEPolicy):
    model_types = ("qwen2_moe",)
    model_class = Qwen2MoEModel
    layer_container = LlamaLayer
    moe_container = Qwen2ExpertsLayer
    fused_container = Qwen2FusedExpertsLayer
    outer_container = LlamaOuter
