"""Traits: what a family says of itself, read from the Hugging Face config. TransformerModel turns them into modules.

A family overrides those that its config spells otherwise, as a property or a plain class attribute.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from torch import Tensor

from phalanx.models.hf_config import HFConfig, ModelConfigError
from phalanx.models.rope import RopeSettings, rope_settings
from phalanx.ops.activation import check_activation
from phalanx.weights import WeightError
from phalanx.weights.quantized import check_packing

SIZES = ("num_layers", "hidden_size", "intermediate_size", "vocab_size", "num_heads", "num_kv_heads", "head_dim")

NormPlacement = Literal["pre", "post", "sandwich"]
NORMS: dict[str, tuple[str, ...]] = {
    "pre": ("attn_norm", "mlp_norm"),
    "post": ("attn_post_norm", "mlp_post_norm"),
    "sandwich": ("attn_norm", "attn_post_norm", "mlp_norm", "mlp_post_norm"),
}
"""The norms of a layer, as parameter names of its container."""

BIASED = ("qkv", "attn_out", "mlp_1", "mlp_2", "word_unembed")
"""The linear layers: they may have a bias, and so do the norms if they are LayerNorms."""


def integer_of(key: str) -> Any:
    """A trait that is a whole number which the config calls ``key``: ``num_layers = integer_of("n_layer")``."""
    return property(lambda self: self.config.integer(key))


class Traits:
    """The traits of one model.

    Args:
        config: the Hugging Face config.
    """

    def __init__(self, config: HFConfig) -> None:
        self.config = config

    # -- sizes

    @property
    def num_layers(self) -> int:
        return self.config.integer("num_hidden_layers")

    @property
    def hidden_size(self) -> int:
        return self.config.integer("hidden_size")

    @property
    def intermediate_size(self) -> int:
        return self.config.integer("intermediate_size")

    @property
    def vocab_size(self) -> int:
        return self.config.integer("vocab_size")

    @property
    def num_heads(self) -> int:
        return self.config.integer("num_attention_heads")

    @property
    def num_kv_heads(self) -> int:
        given = self.config.get("num_key_value_heads")
        return self.num_heads if given is None else self.config.integer("num_key_value_heads")

    @property
    def head_dim(self) -> int:
        given = self.config.get("head_dim")
        return self.hidden_size // self.num_heads if given is None else self.config.integer("head_dim")

    @property
    def max_sequence_length(self) -> int:
        """Tokens that the config calls the model good for, rope scaling counted in."""
        return scaled_length(self.rope) if self.rope is not None else self.config.integer("max_position_embeddings")

    # -- the layer

    @property
    def norm_type(self) -> str:
        """ "rms_norm" or "layer_norm"."""
        return "rms_norm"

    @property
    def norm_eps(self) -> float:
        return self.config.number("rms_norm_eps" if self.norm_type == "rms_norm" else "layer_norm_eps")

    @property
    def norm_offset(self) -> float:
        """What is added to the weights of norms: 1 where a checkpoint stores their distance from 1."""
        return 0.0

    @property
    def norm_placement(self) -> NormPlacement:
        """Where a layer's norms stand: before attention and MLP ("pre"), on what they return ("post"), or both
        ("sandwich"). ``NORMS`` names their parameters."""
        return "pre"

    @property
    def parallel_residual(self) -> bool:
        """Attention and MLP read the same hidden states, and both are added to them. A container without ``mlp_norm``
        says that they share a norm."""
        return False

    @property
    def activation(self) -> str:
        return str(self.config.hidden_act)

    @property
    def gated_mlp(self) -> bool:
        """Whether the MLP is ``down(act(gate) * up)`` rather than ``down(act(up))``."""
        return True

    @property
    def qkv_bias(self) -> bool:
        return bool(self.config.get("attention_bias", False))

    @property
    def attn_out_bias(self) -> bool:
        return bool(self.config.get("attention_bias", False))

    @property
    def mlp_bias(self) -> bool:
        return bool(self.config.get("mlp_bias", False))

    # -- attention

    @property
    def qk_norm(self) -> bool:
        """A norm of every query and key head, before rope; its parameters are ``q_norm`` and ``k_norm``."""
        return False

    @property
    def attention_scale(self) -> float:
        return float(self.head_dim**-0.5)

    @property
    def attention_soft_cap(self) -> float | None:
        """Scores are ``cap * tanh(score / cap)``; None for none."""
        return None

    @property
    def key_bias(self) -> Tensor | None:
        """float32 [num_heads, max_sequence_length], added to the scores of a key by its position (ALiBi); None for
        none."""
        return None

    @property
    def sliding_window(self) -> int | None:
        """The config's window, for the layers that have one; None for none."""
        return None if self.config.get("sliding_window") is None else self.config.integer("sliding_window")

    def window(self, layer: int) -> int | None:
        """Tokens that a query of this layer sees, itself included; None for all."""
        return None

    # -- positions

    @property
    def rope(self) -> RopeSettings | None:
        """Rotary positions; None for a model without."""
        return rope_settings(self.config, self.head_dim)

    def rope_of(self, layer: int) -> RopeSettings | None:
        """Rotary positions of one layer; None for a layer without. Of those of a model one at most may depend on a
        length, and that one is ``rope``."""
        return self.rope

    @property
    def interleaved_rope(self) -> bool:
        """Rotated pairs are neighbours (GPT-J) rather than half a head apart (NeoX)."""
        return False

    @property
    def learned_positions(self) -> bool:
        """A table of positions, the parameter ``pos_emb``, is added to the embeddings."""
        return False

    @property
    def position_offset(self) -> int:
        """Rows of that table before the one of position 0."""
        return 0

    # -- embedding and head

    @property
    def embedding_scale(self) -> float:
        """Factor of the embeddings, rounded to the model's dtype."""
        return 1.0

    @property
    def tied_head(self) -> bool:
        """The head is the embedding table, whatever head the checkpoint stores."""
        return self.config.boolean("tie_word_embeddings")

    @property
    def logit_soft_cap(self) -> float | None:
        """Logits are ``cap * tanh(logit / cap)``; None for none."""
        return None

    def unmapped_params(self) -> Sequence[str]:
        """Checkpoint names that this config makes meaningless."""
        return ("lm_head.weight",) if self.tied_head else ()

    # -- what follows from them

    @property
    def layer_parameters(self) -> frozenset[str]:
        """The parameters of a layer that the forward reads, biases aside.

        A model whose own steps read others adds them: a container may not hold what nobody reads.
        """
        names = {*NORMS[self.norm_placement], "qkv", "attn_out", "mlp_1", "mlp_2"}
        return frozenset(names | ({"q_norm", "k_norm"} if self.qk_norm else set()))

    def reads_bias(self, name: str) -> bool:
        """Whether the forward also reads ``<name>_bias``, where a container has it."""
        return name in BIASED or (name.endswith("norm") and self.norm_type == "layer_norm")

    @property
    def outer_parameters(self) -> frozenset[str]:
        """The same of the container outside the layers."""
        names = {"word_emb", "final_norm", "word_unembed"}
        return frozenset(names | ({"pos_emb"} if self.learned_positions else set()))

    def check_traits(self) -> None:
        """Refuses what no model can be.

        Raises:
            ModelConfigError, ValueError: naming the trait.
        """
        packed = self.config.get("quantization_config")
        if packed:
            try:
                check_packing(packed)
            except WeightError as error:
                raise ModelConfigError(str(error)) from None
        check_activation(self.activation)
        for name in SIZES:
            if getattr(self, name) < 1:
                raise ModelConfigError(f"{name} must be at least 1, the config says {getattr(self, name)}")
        if self.num_heads % self.num_kv_heads:
            raise ModelConfigError(f"{self.num_heads} attention heads do not divide over {self.num_kv_heads} KV heads")
        if self.norm_placement not in NORMS:
            raise ModelConfigError(f"norm_placement {self.norm_placement!r} is unknown: {', '.join(NORMS)}")
        for layer in range(self.num_layers):
            window = self.window(layer)
            if window is not None and window < 1:
                raise ModelConfigError(f"layer {layer} has a window of {window} tokens: expected at least 1, or null")
            rope = self.rope_of(layer)
            if rope is not None and rope.length_dependent and rope != self.rope:
                raise ModelConfigError(
                    f"rope type {rope.kind!r} in some layers beside another in others: not supported"
                )


def scaled_length(rope: RopeSettings) -> int:
    """The context that a config's rope is made for."""
    factor = rope.parameters.get("factor") or 1.0
    if rope.kind in ("linear", "dynamic"):
        return int(rope.max_positions * factor)
    if rope.kind == "yarn":
        return max(rope.max_positions, int(rope.original_max_positions * factor))
    return rope.max_positions
