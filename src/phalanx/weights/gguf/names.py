"""From the tensor names of llama.cpp to those of Hugging Face, for models built like Llama."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from phalanx.weights.source import WeightError


class Architecture(NamedTuple):
    """An architecture of GGUF files: its Hugging Face names, and whether its q and k rows are permuted."""

    model_type: str
    model_class: str
    permuted: bool


ARCHITECTURES = {
    "llama": Architecture("llama", "LlamaForCausalLM", permuted=True),
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM", permuted=False),
    "qwen3": Architecture("qwen3", "Qwen3ForCausalLM", permuted=False),
}

_OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_NAME = re.compile(r"(?:blk\.(?P<layer>\d+)\.)?(?P<part>\w+)\.(?P<kind>weight|bias)")


def hf_name(name: str) -> str | None:
    """The Hugging Face name of a tensor; None for one that such a model does not have."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    layer, part, kind = match["layer"], match["part"], match["kind"]
    if layer is None:
        return f"{_OUTSIDE[part]}.{kind}" if part in _OUTSIDE else None
    return f"model.layers.{int(layer)}.{_IN_LAYER[part]}.{kind}" if part in _IN_LAYER else None


def permuted_heads(name: str, architecture: str, metadata: Mapping[str, Any]) -> int:
    """The number of heads in whose rows llama.cpp has permuted a tensor; 0 for a tensor as it was."""
    if not ARCHITECTURES[architecture].permuted:
        return 0
    if ".attn_q." not in name and ".attn_k." not in name:
        return 0
    heads = metadata.get(f"{architecture}.attention.head_count")
    if ".attn_k." in name:
        heads = metadata.get(f"{architecture}.attention.head_count_kv", heads)
    if not isinstance(heads, int) or heads < 1:
        raise WeightError(f"the head counts of {architecture} in the metadata must be one number, got {heads}")
    return heads


def unpermute(rows: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Undo the permutation in whole heads of `head_dim` rows: interleaved rotary pairs become two halves."""
    heads = rows.shape[0] // head_dim
    return rows.reshape(heads, head_dim // 2, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)
