"""The embedding table and the head."""

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
