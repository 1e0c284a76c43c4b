"""A model of one's own, whole: fused QKV by KV group, a parameter and a step of its own, LayerNorm, no gate."""

import torch
from torch import Tensor

from phalanx.models import InferencePolicy, LayerContainer, ParameterBase, TransformerModel
from phalanx.models import parameters as p
from phalanx.models.parameter import InferenceParameter


class HalvedNorm(ParameterBase):
    """A norm weight that its checkpoints store in two halves."""

    low: torch.Tensor
    high: torch.Tensor

    def finalize(self) -> InferenceParameter | None:
        return self.inference_model.transform_norm_param(torch.cat((self.low, self.high)))


class ToyLayer(LayerContainer):
    attn_norm: HalvedNorm
    qkv: p.GQAMegatronQKVParameter
    attn_out: p.AttentionOutputParameter
    mlp_norm: p.NormParameter
    mlp_1: p.MLP1Parameter
    mlp_2: p.MLP2Parameter

    PARAM_MAPPING = {
        "ln_1.low": "attn_norm.low",
        "ln_1.high": "attn_norm.high",
        "attn.qkv": "qkv.params",
        "attn.out": "attn_out.params",
        "ln_2": "mlp_norm.params",
        "mlp.up": "mlp_1.params",
        "mlp.down": "mlp_2.params",
    }


class ToyOuter(LayerContainer):
    word_emb: p.EmbeddingParameter
    final_norm: p.NormParameter
    word_unembed: p.UnembedParameter

    PARAM_MAPPING = {"wte": "word_emb.params", "ln_f": "final_norm.params", "head": "word_unembed.params"}


class ToyModel(TransformerModel):
    norm_type, norm_eps, gated_mlp = "layer_norm", 1e-5, False

    def forward_mlp(self, layer: int, hidden: Tensor) -> Tensor:
        return super().forward_mlp(layer, hidden).clamp(-1, 1)


class ToyPolicy(InferencePolicy):
    model_types = ("toy_gpt",)
    model_class = ToyModel
    layer_container = ToyLayer
    outer_container = ToyOuter
    layer_prefix = "h"
