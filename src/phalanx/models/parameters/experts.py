"""Experts and their routers: checkpoints with a tensor for each expert, or with one for all of a layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from phalanx.models.parameter import InferenceParameter, ParameterBase, ParametrizedList

if TYPE_CHECKING:
    from phalanx.models.moe import MoETransformerModel


class ExpertList(ParametrizedList):
    """A tensor for each expert of a layer."""

    count_attr = "num_experts"


class ExpertsParameterBase(ParameterBase):
    """A parameter of a MoETransformerModel."""

    if TYPE_CHECKING:
        inference_model: MoETransformerModel


class MoEGateParameter(ExpertsParameterBase):
    """The router's weight [experts, hidden]."""

    params: torch.Tensor

    def finalize(self) -> InferenceParameter | None:
        return self.inference_model.transform_moe_gate_param(self.params)

    def expected_shape(self, dependency: str, ndim: int) -> tuple[int, ...]:
        return (self.inference_model.num_experts, self.inference_model.hidden_size)


class MoEMLP1Parameter(ExpertsParameterBase):
    """The up projection of every expert without gate, a tensor each."""

    experts: ExpertList

    def finalize(self) -> InferenceParameter | None:
        return self.inference_model.transform_moe_mlp_1_param(list(self.experts))

    def expected_shape(self, dependency: str, ndim: int) -> tuple[int, ...]:
        return (self.inference_model.expert_intermediate_size, self.inference_model.hidden_size)


class MoEGatedMLPParameter(ExpertsParameterBase):
    """Gate and up projections of every expert, two tensors each."""

    gate_experts: ExpertList
    up_experts: ExpertList

    def finalize(self) -> InferenceParameter | None:
        pairs = list(zip(self.gate_experts, self.up_experts, strict=True))
        return self.inference_model.transform_moe_mlp_1_param(pairs)

    def expected_shape(self, dependency: str, ndim: int) -> tuple[int, ...]:
        return (self.inference_model.expert_intermediate_size, self.inference_model.hidden_size)


class MoEMLP2Parameter(ExpertsParameterBase):
    """The down projection of every expert, a tensor each."""

    experts: ExpertList

    def finalize(self) -> InferenceParameter | None:
        return self.inference_model.transform_moe_mlp_2_param(list(self.experts))

    def expected_shape(self, dependency: str, ndim: int) -> tuple[int, ...]:
        return (self.inference_model.hidden_size, self.inference_model.expert_intermediate_size)


class FusedMoEGatedMLPParameter(ExpertsParameterBase):
    """One tensor [experts, gate | up, hidden] of all experts."""

    params: torch.Tensor

    def finalize(self) -> InferenceParameter | None:
        return self.inference_model.transform_moe_mlp_1_param(self.params)

    def expected_shape(self, dependency: str, ndim: int) -> tuple[int, ...]:
        model = self.inference_model
        return (model.num_experts, 2 * model.expert_intermediate_size, model.hidden_size)


class FusedMoEMLP2Parameter(ExpertsParameterBase):
    """One tensor [experts, hidden, in] of all experts' down projections."""

    params: torch.Tensor

    def finalize(self) -> InferenceParameter | None:
        return self.inference_model.transform_moe_mlp_2_param(self.params)

    def expected_shape(self, dependency: str, ndim: int) -> tuple[int, ...]:
        model = self.inference_model
        return (model.num_experts, model.hidden_size, model.expert_intermediate_size)


class SharedGateParameter(ExpertsParameterBase):
    """The weight [1, hidden] of the gate before a shared expert."""

    params: torch.Tensor

    def finalize(self) -> InferenceParameter | None:
        return self.inference_model.transform_shared_gate_param(self.params)

    def expected_shape(self, dependency: str, ndim: int) -> tuple[int, ...]:
        return (1, self.inference_model.hidden_size)


class SharedGatedMLPParameter(ExpertsParameterBase):
    """Gate and up projections of a shared expert, two tensors."""

    gate_params: torch.Tensor
    up_params: torch.Tensor

    def finalize(self) -> InferenceParameter | None:
        return self.inference_model.transform_shared_mlp_1_param((self.gate_params, self.up_params))

    def expected_shape(self, dependency: str, ndim: int) -> tuple[int, ...]:
        return (self.inference_model.shared_expert_size, self.inference_model.hidden_size)


class SharedMLP2Parameter(ExpertsParameterBase):
    """The down projection of a shared expert."""

    params: torch.Tensor

    def finalize(self) -> InferenceParameter | None:
        return self.inference_model.transform_shared_mlp_2_param(self.params)

    def expected_shape(self, dependency: str, ndim: int) -> tuple[int, ...]:
        return (self.inference_model.hidden_size, self.inference_model.shared_expert_size)
