"""EXAONE 4.5, its text part: an EXAONE 4 inside. The tensors of its vision part and of multi-token prediction are left
out; it answers text only."""

from __future__ import annotations

from phalanx.models.exaone4 import Exaone4Policy
from phalanx.models.llama import LlamaOuter


class Exaone45Outer(LlamaOuter):
    PARAM_MAPPING = {
        "model.language_model.embed_tokens.weight": "word_emb.params",
        "model.language_model.norm.weight": "final_norm.params",
    }


class Exaone45Policy(Exaone4Policy):
    model_types = ("exaone4_5",)
    outer_container = Exaone45Outer
    layer_prefix = "model.language_model.layers"
    unmapped = ("*.rotary_emb.inv_freq", "model.visual", "mtp")
