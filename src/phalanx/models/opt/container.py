"""OPT's tensors. The decoder is found as ``model.decoder`` or, in checkpoints without a head, as ``decoder``."""

from __future__ import annotations

import torch

from phalanx.models.container import LayerContainer, with_biases
from phalanx.models.opt.model import OPTModel
from phalanx.models.parameter import InferenceParameter, ParameterBase
from phalanx.models.parameters import (
    AttentionOutputBiasParameter,
    AttentionOutputParameter,
    EmbeddingParameter,
    MLP1BiasParameter,
    MLP1Parameter,
    MLP2BiasParameter,
    MLP2Parameter,
    PositionEmbeddingParameter,
    UnembedParameter,
    UnfusedQKVBiasParameter,
    UnfusedQKVParameter,
)


class AffineNorm(ParameterBase):
    """Weight or bias of a LayerNorm that has them exactly if the config says so."""

    params: torch.Tensor | None

    def finalize(self) -> InferenceParameter | None:
        return self.inference_model.transform_norm_param(self.params)

    def expected_shape(self, dependency: str, ndim: int) -> tuple[int, ...]:
        return (self.inference_model.hidden_size,)

    def required(self, dependency: str) -> bool:
        return self.inference_model.config.boolean("layer_norm_elementwise_affine")


class NarrowEmbedding(EmbeddingParameter):
    """The token embedding [vocab, embedding_size]."""

    inference_model: OPTModel

    def expected_shape(self, dependency: str, ndim: int) -> tuple[int, ...]:
        return (self.inference_model.vocab_size, self.inference_model.embedding_size)


class NarrowUnembed(UnembedParameter):
    """The head [vocab, embedding_size]."""

    inference_model: OPTModel

    def expected_shape(self, dependency: str, ndim: int) -> tuple[int, ...]:
        return (self.inference_model.vocab_size, self.inference_model.embedding_size)


class Projection(ParameterBase):
    """A projection from or to the width of the embedding, whole on every rank."""

    inference_model: OPTModel
    params: torch.Tensor

    def finalize(self) -> InferenceParameter | None:
        return self.inference_model.transform_projection_param(self.params)

    def expected_shape(self, dependency: str, ndim: int) -> tuple[int, ...]:
        model = self.inference_model
        shape = (model.hidden_size, model.embedding_size)
        return shape if self.name == "project_in" else shape[::-1]


class OPTLayer(LayerContainer):
    attn_norm: AffineNorm
    attn_norm_bias: AffineNorm
    qkv: UnfusedQKVParameter
    qkv_bias: UnfusedQKVBiasParameter
    attn_out: AttentionOutputParameter
    attn_out_bias: AttentionOutputBiasParameter
    mlp_norm: AffineNorm
    mlp_norm_bias: AffineNorm
    mlp_1: MLP1Parameter
    mlp_1_bias: MLP1BiasParameter
    mlp_2: MLP2Parameter
    mlp_2_bias: MLP2BiasParameter

    PARAM_MAPPING = {
        **{f"self_attn.{part}_proj.weight": f"qkv.{part}_params" for part in "qkv"},
        **{f"self_attn.{part}_proj.bias": f"qkv_bias.{part}_params" for part in "qkv"},
        **with_biases(
            {
                "self_attn_layer_norm": "attn_norm",
                "self_attn.out_proj": "attn_out",
                "final_layer_norm": "mlp_norm",
                "fc1": "mlp_1",
                "fc2": "mlp_2",
            }
        ),
    }


class OPTOuter(LayerContainer):
    word_emb: NarrowEmbedding
    pos_emb: PositionEmbeddingParameter
    word_unembed: NarrowUnembed

    PARAM_MAPPING = {
        "*decoder.embed_tokens.weight": "word_emb.params",
        "*decoder.embed_positions.weight": "pos_emb.params",
        "lm_head.weight": "word_unembed.params",
    }


class FinalNorm(LayerContainer):
    final_norm: AffineNorm
    final_norm_bias: AffineNorm

    PARAM_MAPPING = with_biases({"*decoder.final_layer_norm": "final_norm"})


class Projections(LayerContainer):
    project_in: Projection
    project_out: Projection

    PARAM_MAPPING = {
        "*decoder.project_in.weight": "project_in.params",
        "*decoder.project_out.weight": "project_out.params",
    }


class NormedOuter(OPTOuter, FinalNorm): ...


class ProjectedOuter(OPTOuter, Projections): ...


class NormedProjectedOuter(OPTOuter, FinalNorm, Projections): ...
