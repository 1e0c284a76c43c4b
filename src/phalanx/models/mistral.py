"""Mistral: Llama with a window on every layer."""

from __future__ import annotations

from phalanx.models.base import TransformerModel
from phalanx.models.hf_config import ModelConfigError
from phalanx.models.llama import LlamaPolicy


class MistralModel(TransformerModel):
    def window(self, layer: int) -> int | None:
        return self.sliding_window

    def check_traits(self) -> None:
        super().check_traits()
        if len(set(self.config.get("layer_types") or ())) > 1:
            raise ModelConfigError("layer_types that differ: a model_type 'mistral' has one window for all layers")


class MistralPolicy(LlamaPolicy):
    model_types = ("mistral",)
    model_class = MistralModel
