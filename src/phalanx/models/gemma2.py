"""Gemma 2: norms before and after, stored as distance from 1; scaled embedding, soft caps, every second layer local."""

from __future__ import annotations

from phalanx.models.base import TransformerModel
from phalanx.models.hf_config import ModelConfigError
from phalanx.models.layer_types import FULL, SLIDING, LayerTypes
from phalanx.models.llama import LlamaLayer, LlamaPolicy
from phalanx.models.parameters import NormParameter


class Gemma2Layer(LlamaLayer):
    attn_post_norm: NormParameter
    mlp_post_norm: NormParameter

    PARAM_MAPPING = {
        "post_attention_layernorm.weight": "attn_post_norm.params",
        "pre_feedforward_layernorm.weight": "mlp_norm.params",
        "post_feedforward_layernorm.weight": "mlp_post_norm.params",
    }


class Gemma2Model(LayerTypes, TransformerModel):
    norm_placement = "sandwich"
    norm_offset = 1.0

    @property
    def embedding_scale(self) -> float:
        return float(self.hidden_size**0.5)

    @property
    def activation(self) -> str:
        return str(self.config.hidden_activation)

    @property
    def attention_scale(self) -> float:
        return float(self.config.number("query_pre_attn_scalar") ** -0.5)

    @property
    def attention_soft_cap(self) -> float | None:
        return self.cap("attn_logit_softcapping")

    @property
    def logit_soft_cap(self) -> float | None:
        return self.cap("final_logit_softcapping")

    def cap(self, key: str) -> float | None:
        """A soft cap of the config; null for none."""
        return None if self.config.get(key) is None else self.config.number(key)

    def layer_type(self, layer: int) -> str:
        return SLIDING if layer % 2 == 0 else FULL

    def check_traits(self) -> None:
        super().check_traits()
        if self.config.boolean("use_bidirectional_attention"):
            raise ModelConfigError("use_bidirectional_attention=true: an encoder cannot be served token by token")


class Gemma2Policy(LlamaPolicy):
    model_types = ("gemma2",)
    model_class = Gemma2Model
    layer_container = Gemma2Layer
