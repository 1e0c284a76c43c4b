"""GPT-2: learned positions, LayerNorms, fused [Q; K; V], and weights that are stored [in, out]."""

from __future__ import annotations

from typing import Any

from phalanx.models.base import TransformerModel
from phalanx.models.container import LayerContainer, with_biases
from phalanx.models.hf_config import ModelConfigError
from phalanx.models.layers import Attention
from phalanx.models.parameter import ParameterBase
from phalanx.models.parameters import (
    AttentionOutputParameter,
    EmbeddingParameter,
    FusedQKVParameter,
    MLP1Parameter,
    MLP2Parameter,
    NormParameter,
    PositionEmbeddingParameter,
    UnembedParameter,
)
from phalanx.models.parameters.transposed import Transposed
from phalanx.models.policy import InferencePolicy
from phalanx.models.traits import integer_of


class Conv1D(ParameterBase):
    """A linear whose weight is stored [in, out]."""

    def set(self, name: str, value: Any) -> None:
        super().set(name, Transposed(value) if value is not None and len(value.shape) == 2 else value)

    def expected_shape(self, dependency: str, ndim: int) -> Any:
        shape = super().expected_shape(dependency, ndim)
        return None if shape is None else shape[::-1]


class QKV(Conv1D, FusedQKVParameter): ...


class AttentionOutput(Conv1D, AttentionOutputParameter): ...


class MLP1(Conv1D, MLP1Parameter): ...


class MLP2(Conv1D, MLP2Parameter): ...


class GPT2Layer(LayerContainer):
    attn_norm: NormParameter
    attn_norm_bias: NormParameter
    qkv: QKV
    qkv_bias: QKV
    attn_out: AttentionOutput
    attn_out_bias: AttentionOutput
    mlp_norm: NormParameter
    mlp_norm_bias: NormParameter
    mlp_1: MLP1
    mlp_1_bias: MLP1
    mlp_2: MLP2
    mlp_2_bias: MLP2

    PARAM_MAPPING = with_biases(
        {
            "ln_1": "attn_norm",
            "attn.c_attn": "qkv",
            "attn.c_proj": "attn_out",
            "ln_2": "mlp_norm",
            "mlp.c_fc": "mlp_1",
            "mlp.c_proj": "mlp_2",
        }
    )


class GPT2Outer(LayerContainer):
    word_emb: EmbeddingParameter
    pos_emb: PositionEmbeddingParameter
    final_norm: NormParameter
    final_norm_bias: NormParameter
    word_unembed: UnembedParameter

    PARAM_MAPPING = {
        "*wte.weight": "word_emb.params",
        "*wpe.weight": "pos_emb.params",
        "*ln_f.weight": "final_norm.params",
        "*ln_f.bias": "final_norm_bias.params",
        "lm_head.weight": "word_unembed.params",
    }


class GPT2Model(TransformerModel):
    norm_type = "layer_norm"
    gated_mlp = False
    rope = None
    learned_positions = True
    num_layers = integer_of("n_layer")
    hidden_size = integer_of("n_embd")
    num_heads = integer_of("n_head")
    max_sequence_length = integer_of("n_positions")

    @property
    def intermediate_size(self) -> int:
        return 4 * self.hidden_size if self.config.get("n_inner") is None else self.config.integer("n_inner")

    @property
    def norm_eps(self) -> float:
        return self.config.number("layer_norm_epsilon")

    @property
    def activation(self) -> str:
        return str(self.config.activation_function)

    @property
    def attention_scale(self) -> float:
        return super().attention_scale if self.config.boolean("scale_attn_weights") else 1.0

    def make_attn_layer(self, layer: int) -> Attention:
        made = super().make_attn_layer(layer)
        if self.config.boolean("scale_attn_by_inverse_layer_idx"):
            made.scale /= layer + 1
        return made

    def check_traits(self) -> None:
        super().check_traits()
        if self.config.boolean("add_cross_attention"):
            raise ModelConfigError("add_cross_attention=true: a decoder of an encoder's states is not supported")


class GPT2Policy(InferencePolicy):
    model_types = ("gpt2",)
    model_class = GPT2Model
    layer_container = GPT2Layer
    outer_container = GPT2Outer
    layer_prefix = ("transformer.h", "h")
    unmapped = ("*.attn.bias", "*.attn.masked_bias")
