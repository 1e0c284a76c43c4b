"""How a Qwen is put together."""

from __future__ import annotations

from phalanx.models.policy import InferencePolicy
from phalanx.models.qwen.container import QwenLayer, QwenOuter
from phalanx.models.qwen.model import QwenModel


class QwenPolicy(InferencePolicy):
    model_types = ("qwen",)
    model_class = QwenModel
    layer_container = QwenLayer
    outer_container = QwenOuter
    layer_prefix = "transformer.h"
    unmapped = ("*.rotary_emb.inv_freq", "*.attn.bias", "*.attn.masked_bias")
