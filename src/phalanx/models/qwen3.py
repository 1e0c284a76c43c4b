"""Qwen3: Llama with norms of query and key heads, and Qwen2's windows."""

from __future__ import annotations

from phalanx.models.base import TransformerModel
from phalanx.models.container import LayerContainer
from phalanx.models.llama import LlamaLayer, LlamaPolicy
from phalanx.models.parameters import HeadNormParameter
from phalanx.models.qwen2 import QwenLayerTypes


class NormedHeads(LayerContainer):
    q_norm: HeadNormParameter
    k_norm: HeadNormParameter

    PARAM_MAPPING = {"self_attn.q_norm.weight": "q_norm.params", "self_attn.k_norm.weight": "k_norm.params"}


class Qwen3Layer(LlamaLayer, NormedHeads): ...


class Qwen3Model(QwenLayerTypes, TransformerModel):
    qk_norm = True


class Qwen3Policy(LlamaPolicy):
    model_types = ("qwen3",)
    model_class = Qwen3Model
    layer_container = Qwen3Layer
