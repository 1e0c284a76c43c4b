"""Norm weights and biases."""

from __future__ import annotations

import torch

from phalanx.models.parameter import InferenceParameter, ParameterBase


class NormParameter(ParameterBase):
    """Weight or bias of a norm over the hidden size; a bias by its name in the container, ``..._bias``."""

    params: torch.Tensor

    def finalize(self) -> InferenceParameter | None:
        model = self.inference_model
        is_bias = self.name.endswith("_bias")
        return model.transform_norm_bias_param(self.params) if is_bias else model.transform_norm_param(self.params)

    def expected_shape(self, dependency: str, ndim: int) -> tuple[int, ...]:
        return (self.inference_model.hidden_size,)


class HeadNormParameter(NormParameter):
    """Weight or bias of a norm over each query or key head."""

    def expected_shape(self, dependency: str, ndim: int) -> tuple[int, ...]:
        return (self.inference_model.head_dim,)
