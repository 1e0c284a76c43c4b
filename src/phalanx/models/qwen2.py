"""Qwen2 and 2.5: Llama with biases on Q, K and V, and a window on the layers from ``max_window_layers`` on."""

from __future__ import annotations

from phalanx.models.base import TransformerModel
from phalanx.models.layer_types import FULL, SLIDING, LayerTypes
from phalanx.models.llama import LlamaPolicy


class QwenLayerTypes(LayerTypes):
    """Windows as Qwen's configs spell them."""

    @property
    def sliding_window(self) -> int | None:
        return super().sliding_window if self.config.boolean("use_sliding_window") else None

    def layer_type(self, layer: int) -> str:
        return SLIDING if self.sliding_window and layer >= self.config.integer("max_window_layers") else FULL


class Qwen2Model(QwenLayerTypes, TransformerModel):
    qkv_bias = True


class Qwen2Policy(LlamaPolicy):
    model_types = ("qwen2",)
    model_class = Qwen2Model
