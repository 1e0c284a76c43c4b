"""OLMo 2: norms on what attention and MLP return, and over all queries and all keys of a token together."""

from __future__ import annotations

import torch
from torch import Tensor

from phalanx.layout.heads import kv_copies
from phalanx.models.base import StepState, TransformerModel
from phalanx.models.exaone4 import Exaone4Layer
from phalanx.models.llama import LlamaOuter
from phalanx.models.parameter import InferenceParameter
from phalanx.models.parameters import AttentionOutputBiasParameter, HeadNormParameter, UnfusedQKVBiasParameter
from phalanx.models.policy import InferencePolicy


class WideNorm(HeadNormParameter):
    """The weight of a norm over all query heads, or over all KV heads."""

    def finalize(self) -> InferenceParameter | None:
        return self.inference_model.transform_head_weight_param(self.params, queries=self.name == "q_norm")

    def expected_shape(self, dependency: str, ndim: int) -> tuple[int, ...]:
        model = self.inference_model
        return ((model.num_heads if self.name == "q_norm" else model.num_kv_heads) * model.head_dim,)


class Olmo2Layer(Exaone4Layer):
    qkv_bias: UnfusedQKVBiasParameter
    attn_out_bias: AttentionOutputBiasParameter
    q_norm: WideNorm
    k_norm: WideNorm

    PARAM_MAPPING = {
        **{f"self_attn.{part}_proj.bias": f"qkv_bias.{part}_params" for part in "qkv"},
        "self_attn.o_proj.bias": "attn_out_bias.params",
    }


class Olmo2Model(TransformerModel):
    norm_placement = "post"
    qk_norm = True

    def forward_heads(self, layer: int, state: StepState, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        # The mean square is over the heads of all ranks; a KV head that several ranks hold counts once.
        copies = kv_copies(self.num_heads, self.num_kv_heads, self.group.rank, self.group.size)
        shares = (self.num_heads * self.head_dim, max(copies, 1) * self.num_kv_heads * self.head_dim)
        wide = [x.to(torch.promote_types(x.dtype, torch.float32)) for x in (q, k)]
        parts = [x.square().sum((1, 2)) / share for x, share in zip(wide, shares, strict=True)]
        factors = torch.rsqrt(self.group.all_reduce(torch.stack(parts)) + self.norm_eps)[..., None, None]
        p = self.layers[layer]
        weights = [weight.data.view(-1, self.head_dim) for weight in (p.q_norm, p.k_norm)]
        q, k = ((x * f * w).to(q.dtype) for x, f, w in zip(wide, factors, weights, strict=True))
        return q, k


class Olmo2Policy(InferencePolicy):
    model_types = ("olmo2",)
    model_class = Olmo2Model
    layer_container = Olmo2Layer
    outer_container = LlamaOuter
