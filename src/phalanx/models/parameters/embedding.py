"""The embedding table, positions and the head."""

from __future__ import annotations

import torch

from phalanx.models.parameter import InferenceParameter, ParameterBase


class EmbeddingParameter(ParameterBase):
    """The token embedding [vocab, hidden]."""

    params: torch.Tensor

    def finalize(self) -> InferenceParameter | None:
        return self.inference_model.transform_embedding_param(self.params)

    def expected_shape(self, dependency: str, ndim: int) -> tuple[int, ...]:
        return (self.inference_model.vocab_size, self.inference_model.hidden_size)


class UnembedParameter(ParameterBase):
    """The head [vocab, hidden]: needed exactly if it is not tied to the embedding."""

    params: torch.Tensor | None

    def finalize(self) -> InferenceParameter | None:
        return self.inference_model.transform_unembed_param(self.params)

    def expected_shape(self, dependency: str, ndim: int) -> tuple[int, ...]:
        return (self.inference_model.vocab_size, self.inference_model.hidden_size)

    def required(self, dependency: str) -> bool:
        return not self.inference_model.tied_head


class UnembedBiasParameter(ParameterBase):
    """The bias [vocab] of a head that has one."""

    params: torch.Tensor

    def finalize(self) -> InferenceParameter | None:
        return self.inference_model.transform_unembed_param(self.params)

    def expected_shape(self, dependency: str, ndim: int) -> tuple[int, ...]:
        return (self.inference_model.vocab_size,)


class PositionEmbeddingParameter(ParameterBase):
    """The table of learned positions [offset + positions, hidden]; see the traits ``learned_positions``."""

    params: torch.Tensor

    def finalize(self) -> InferenceParameter | None:
        return self.inference_model.transform_position_param(self.params)

    def expected_shape(self, dependency: str, ndim: int) -> tuple[int, ...]:
        model = self.inference_model
        return (model.position_offset + model.max_sequence_length, model.hidden_size)


class InvFreqParameter(ParameterBase):
    """Inverse frequencies of rope that a checkpoint stores, in float32.

    No trait reads them, since a config says them exactly; a model whose ``prepare_batch`` does adds them to
    ``layer_parameters`` or ``outer_parameters``.
    """

    params: torch.Tensor

    def finalize(self) -> InferenceParameter | None:
        return self.inference_model.transform_inv_freq_param(self.params)

    def expected_shape(self, dependency: str, ndim: int) -> tuple[int, ...] | None:
        rope = self.inference_model.rope
        return None if rope is None else (rope.rotary_dim // 2,)
