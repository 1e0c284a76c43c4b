"""Qwen's traits, and what it does beyond the length that it was trained at (``seq_length``).

Dynamic NTK: rope's base grows by steps, with every doubling of the length. As for all rope of the kit that depends on a
length, a prompt's tokens take the prompt's length and a generated token its own, so that results do not depend on how
a text was cut into steps; Qwen's own code keeps the prompt's for the whole answer.

Log-n scaling: queries of positions beyond ``seq_length`` are multiplied by the logarithm of the position to that base.
"""

from __future__ import annotations

import math
from dataclasses import fields

import torch
from torch import Tensor

from phalanx.models.base import StepState, TransformerModel
from phalanx.models.rope import RopeSettings, RotaryEmbedding, rope_settings


class SteppedRope(RopeSettings):
    """Rope whose base grows with every doubling of the length beyond ``original_max_positions``."""

    @property
    def length_dependent(self) -> bool:
        return True

    def regime(self, length: int) -> int:
        """The factor that the base is stretched by."""
        ratio = length / self.original_max_positions
        return 1 if ratio <= 1 else 2 ** math.ceil(math.log2(ratio) + 1) - 1


class SteppedRotary(RotaryEmbedding):
    """Its cosines and sines."""

    def inverse_frequencies(self, rope_lens: Tensor) -> Tensor:
        settings = self.settings
        ratios = (rope_lens / settings.original_max_positions).clamp_min(1)
        stretch = torch.where(ratios <= 1, 1.0, torch.exp2(torch.ceil(torch.log2(ratios) + 1)) - 1)
        base = settings.theta * stretch ** (settings.rotary_dim / (settings.rotary_dim - 2))
        return torch.reciprocal(base[:, None] ** self._exponents)


class QwenModel(TransformerModel):
    activation = "silu"
    qkv_bias = True

    @property
    def head_dim(self) -> int:
        return self.config.integer("kv_channels")

    @property
    def intermediate_size(self) -> int:
        return self.config.integer("intermediate_size") // 2

    @property
    def norm_eps(self) -> float:
        return self.config.number("layer_norm_epsilon")

    @property
    def attn_out_bias(self) -> bool:
        return not self.config.boolean("no_bias")

    mlp_bias = attn_out_bias

    @property
    def rope(self) -> RopeSettings:
        plain = rope_settings(self.config, self.head_dim, theta_key="rotary_emb_base", partial_key="rotary_pct")
        if not self.config.boolean("use_dynamic_ntk"):
            return plain
        values = {field.name: getattr(plain, field.name) for field in fields(plain)}
        return SteppedRope(**{**values, "original_max_positions": self.config.integer("seq_length")})

    def make_rotary(self, rope: RopeSettings) -> RotaryEmbedding:
        return (SteppedRotary if isinstance(rope, SteppedRope) else RotaryEmbedding)(rope, self.device)

    def forward_heads(self, layer: int, state: StepState, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        if not self.config.boolean("use_logn_attn"):
            return q, k
        lengths = (state.batch.positions + 1).float()
        factors = (lengths.log() / math.log(self.config.integer("seq_length"))).clamp_min(1)
        return q * factors[:, None, None].to(q.dtype), k
