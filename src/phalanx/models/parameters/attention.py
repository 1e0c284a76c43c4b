"""Attention projections. Where a class is not called a bias, it serves weights [out, in] and biases [out] alike."""

from __future__ import annotations

import torch

from phalanx.models.parameter import InferenceParameter, ParameterBase
from phalanx.models.parameters.rows import Rows


def rows_shape(rows: int, columns: int, ndim: int) -> tuple[int, ...]:
    """Shape of a weight [rows, columns], or of the bias [rows] where ``ndim`` is 1."""
    return (rows,) if ndim == 1 else (rows, columns)


class FusedQKVParameter(ParameterBase):
    """One tensor stacked as [Q; K; V], weight or bias."""

    params: torch.Tensor

    def finalize(self) -> InferenceParameter | None:
        return self.inference_model.transform_qkv_param(self.params)

    def expected_shape(self, dependency: str, ndim: int) -> tuple[int, ...]:
        model = self.inference_model
        rows = (model.num_heads + 2 * model.num_kv_heads) * model.head_dim
        return rows_shape(rows, model.hidden_size, ndim)


class FusedQKVBiasParameter(ParameterBase):
    """One bias stacked as [Q; K; V] that is there exactly if the model's trait ``qkv_bias`` says so."""

    params: torch.Tensor | None

    def finalize(self) -> InferenceParameter | None:
        return self.inference_model.transform_qkv_param(self.params)

    def expected_shape(self, dependency: str, ndim: int) -> tuple[int, ...]:
        model = self.inference_model
        return ((model.num_heads + 2 * model.num_kv_heads) * model.head_dim,)

    def required(self, dependency: str) -> bool:
        return self.inference_model.qkv_bias


class MegatronQKVParameter(FusedQKVParameter):
    """One tensor that interleaves [q, k, v] of every head, weight or bias; as many KV heads as query heads."""

    def finalize(self) -> InferenceParameter | None:
        model = self.inference_model
        if model.num_heads != model.num_kv_heads:
            raise ValueError(
                f"{model.num_heads} query and {model.num_kv_heads} KV heads, but a layout of [q, k, v] a head needs as "
                "many of each: GQAMegatronQKVParameter has [q..., k, v] a KV head"
            )
        return model.transform_qkv_param(by_kv_group(self.params, model.num_heads, 1, model.head_dim))


class GQAMegatronQKVParameter(FusedQKVParameter):
    """One tensor that holds [its query heads, k, v] of every KV head, weight or bias."""

    def finalize(self) -> InferenceParameter | None:
        model = self.inference_model
        group = model.num_heads // model.num_kv_heads
        return model.transform_qkv_param(by_kv_group(self.params, model.num_kv_heads, group, model.head_dim))


class GQAMegatronQKVBiasParameter(FusedQKVBiasParameter):
    """The bias of that layout, there exactly if the model's trait ``qkv_bias`` says so."""

    def finalize(self) -> InferenceParameter | None:
        if self.params is None:
            return None
        model = self.inference_model
        group = model.num_heads // model.num_kv_heads
        return model.transform_qkv_param(by_kv_group(self.params, model.num_kv_heads, group, model.head_dim))


def by_kv_group(fused: object, num_kv_heads: int, group: int, head_dim: int) -> tuple[Rows, Rows, Rows]:
    """Q, K and V of a tensor that holds [``group`` query heads, k, v] of every KV head."""
    step = (group + 2) * head_dim
    starts = range(0, num_kv_heads * step, step)
    return (
        Rows(fused, [(start, group * head_dim) for start in starts]),
        Rows(fused, [(start + group * head_dim, head_dim) for start in starts]),
        Rows(fused, [(start + (group + 1) * head_dim, head_dim) for start in starts]),
    )


class UnfusedQKVParameter(ParameterBase):
    """Three tensors Q, K and V, weights or biases."""

    q_params: torch.Tensor
    k_params: torch.Tensor
    v_params: torch.Tensor

    def finalize(self) -> InferenceParameter | None:
        return self.inference_model.transform_qkv_param((self.q_params, self.k_params, self.v_params))

    def expected_shape(self, dependency: str, ndim: int) -> tuple[int, ...]:
        model = self.inference_model
        heads = model.num_heads if dependency == "q_params" else model.num_kv_heads
        return rows_shape(heads * model.head_dim, model.hidden_size, ndim)


class UnfusedQKVBiasParameter(ParameterBase):
    """Three biases that are there exactly if the model's trait ``qkv_bias`` says so."""

    q_params: torch.Tensor | None
    k_params: torch.Tensor | None
    v_params: torch.Tensor | None

    def finalize(self) -> InferenceParameter | None:
        return self.inference_model.transform_qkv_param((self.q_params, self.k_params, self.v_params))

    def expected_shape(self, dependency: str, ndim: int) -> tuple[int, ...]:
        model = self.inference_model
        return ((model.num_heads if dependency == "q_params" else model.num_kv_heads) * model.head_dim,)

    def required(self, dependency: str) -> bool:
        return self.inference_model.qkv_bias


class AttentionOutputParameter(ParameterBase):
    """The output projection, weight or bias."""

    params: torch.Tensor

    def finalize(self) -> InferenceParameter | None:
        return self.inference_model.transform_attn_out_param(self.params)

    def expected_shape(self, dependency: str, ndim: int) -> tuple[int, ...]:
        model = self.inference_model
        return rows_shape(model.hidden_size, model.num_heads * model.head_dim, ndim)


class AttentionOutputBiasParameter(ParameterBase):
    """A bias that is there exactly if the model's trait ``attn_out_bias`` says so."""

    params: torch.Tensor | None

    def finalize(self) -> InferenceParameter | None:
        return self.inference_model.transform_attn_out_param(self.params)

    def expected_shape(self, dependency: str, ndim: int) -> tuple[int, ...]:
        return (self.inference_model.hidden_size,)

    def required(self, dependency: str) -> bool:
        return self.inference_model.attn_out_bias
