"""MLP projections. Where a class is not called a bias, it serves weights [out, in] and biases [out] alike."""

from __future__ import annotations

import torch

from phalanx.models.parameter import InferenceParameter, ParameterBase
from phalanx.models.parameters.attention import rows_shape


class MLP1Parameter(ParameterBase):
    """The up projection of an MLP without gate."""

    params: torch.Tensor

    def finalize(self) -> InferenceParameter | None:
        return self.inference_model.transform_mlp_1_param(self.params)

    def expected_shape(self, dependency: str, ndim: int) -> tuple[int, ...]:
        model = self.inference_model
        return rows_shape(model.intermediate_size, model.hidden_size, ndim)


class MLP1BiasParameter(ParameterBase):
    """The bias of the up projection that is there exactly if the model's trait ``mlp_bias`` says so."""

    params: torch.Tensor | None

    def finalize(self) -> InferenceParameter | None:
        return self.inference_model.transform_mlp_1_param(self.params)

    def expected_shape(self, dependency: str, ndim: int) -> tuple[int, ...]:
        return (self.inference_model.intermediate_size,)

    def required(self, dependency: str) -> bool:
        return self.inference_model.mlp_bias


class GatedMLPParameter(ParameterBase):
    """Gate and up projections, two tensors."""

    gate_params: torch.Tensor
    up_params: torch.Tensor

    def finalize(self) -> InferenceParameter | None:
        return self.inference_model.transform_mlp_1_param((self.gate_params, self.up_params))

    def expected_shape(self, dependency: str, ndim: int) -> tuple[int, ...]:
        model = self.inference_model
        return rows_shape(model.intermediate_size, model.hidden_size, ndim)


class GatedMLPBiasParameter(ParameterBase):
    """Biases of gate and up that are there exactly if the model's trait ``mlp_bias`` says so."""

    gate_params: torch.Tensor | None
    up_params: torch.Tensor | None

    def finalize(self) -> InferenceParameter | None:
        return self.inference_model.transform_mlp_1_param((self.gate_params, self.up_params))

    def expected_shape(self, dependency: str, ndim: int) -> tuple[int, ...]:
        return (self.inference_model.intermediate_size,)

    def required(self, dependency: str) -> bool:
        return self.inference_model.mlp_bias


class FusedGatedMLPParameter(ParameterBase):
    """Gate and up projections stacked as [gate; up], weight or bias."""

    params: torch.Tensor

    def finalize(self) -> InferenceParameter | None:
        return self.inference_model.transform_mlp_1_param(self.params)

    def expected_shape(self, dependency: str, ndim: int) -> tuple[int, ...]:
        model = self.inference_model
        return rows_shape(2 * model.intermediate_size, model.hidden_size, ndim)


class MLP2Parameter(ParameterBase):
    """The down projection."""

    params: torch.Tensor

    def finalize(self) -> InferenceParameter | None:
        return self.inference_model.transform_mlp_2_param(self.params)

    def expected_shape(self, dependency: str, ndim: int) -> tuple[int, ...]:
        model = self.inference_model
        return rows_shape(model.hidden_size, model.intermediate_size, ndim)


class MLP2BiasParameter(ParameterBase):
    """The bias of the down projection that is there exactly if the model's trait ``mlp_bias`` says so."""

    params: torch.Tensor | None

    def finalize(self) -> InferenceParameter | None:
        return self.inference_model.transform_mlp_2_param(self.params)

    def expected_shape(self, dependency: str, ndim: int) -> tuple[int, ...]:
        return (self.inference_model.hidden_size,)

    def required(self, dependency: str) -> bool:
        return self.inference_model.mlp_bias
