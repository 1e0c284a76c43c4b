"""Gemma 3, text: Gemma 2 with norms of query and key heads, five local layers to a global one, a rope for each kind.

Of a multimodal one the text part is served; the tensors of its vision part are left out.
"""

from __future__ import annotations

from phalanx.models.gemma2 import Gemma2Layer, Gemma2Model
from phalanx.models.layer_types import FULL, SLIDING
from phalanx.models.llama import LlamaOuter, LlamaPolicy
from phalanx.models.qwen3 import Qwen3Layer
from phalanx.models.rope import RopeSettings, rope_settings
from phalanx.models.traits import integer_of


class Gemma3Layer(Gemma2Layer, Qwen3Layer): ...


class Gemma3Model(Gemma2Model):
    qk_norm = True
    max_sequence_length = integer_of("max_position_embeddings")  # of its configs, which scale rope, this is the end

    @property
    def rope(self) -> RopeSettings:
        return rope_settings(self.config, self.head_dim, layer_type=FULL, default_theta=1e6)

    def rope_of(self, layer: int) -> RopeSettings:
        if self.layer_types[layer] == FULL:
            return self.rope
        return rope_settings(self.config, self.head_dim, layer_type=SLIDING, theta_key="rope_local_base_freq")

    def layer_type(self, layer: int) -> str:
        return SLIDING if (layer + 1) % (self.config.get("sliding_window_pattern") or 6) else FULL


class Gemma3Policy(LlamaPolicy):
    model_types = ("gemma3_text",)
    model_class = Gemma3Model
    layer_container = Gemma3Layer


class TextPartOuter(LlamaOuter):
    PARAM_MAPPING = {
        "*language_model.*embed_tokens.weight": "word_emb.params",
        "*language_model.*norm.weight": "final_norm.params",
        "*lm_head.weight": "word_unembed.params",
    }


class Gemma3TextPartPolicy(Gemma3Policy):
    model_types = ("gemma3",)
    outer_container = TextPartOuter
    layer_prefix = ("language_model.model.layers", "model.language_model.layers")
    unmapped = ("*vision_tower", "*multi_modal_projector")
