"""Tiny random transformers models, one for each way in which attention, MLP and head are laid out."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

_USUAL = {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_hidden_layers": 2,
    "vocab_size": 103,
    "max_position_embeddings": 64,
}
_FALCON = {
    "model_type": "falcon",
    "num_attention_heads": 4,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "vocab_size": 103,
}
_GPT2 = {"n_head": 4, "n_embd": 32, "n_layer": 2, "n_positions": 64, "vocab_size": 103}
_NO_DROP = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
_NO_DROPOUT = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
_MOE = {"moe_intermediate_size": 20, "num_experts": 4, "num_experts_per_tok": 2}

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": _USUAL,
    "llama_tied": {**_USUAL, "model_type": "llama", "tie_word_embeddings": True},
    "llama_biases": {**_USUAL, "model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "qwen2": _USUAL,
    "phi_tied": {**_USUAL, "model_type": "phi", "num_key_value_heads": 4, "tie_word_embeddings": True},
    "qwen2_tied": {**_USUAL, "model_type": "qwen2", "tie_word_embeddings": True},
    "qwen3": {**_USUAL, "head_dim": 16},
    "gpt_neox": {**{k: v for k, v in _USUAL.items() if k != "num_key_value_heads"}, **_NO_DROPOUT},
    "phi3": {**_USUAL, "pad_token_id": 0},
    "falcon_grouped": {**_FALCON, "num_kv_heads": 2, "new_decoder_architecture": True, "bias": False},
    "falcon_multi_query": {**_FALCON, "multi_query": True, "new_decoder_architecture": False, "bias": True},
    "falcon_head_major": {
        **_FALCON,
        "multi_query": False,
        "alibi": True,
        "parallel_attn": False,
        "new_decoder_architecture": False,
        "bias": True,
    },
    "bloom": {"n_head": 4, "hidden_size": 32, "n_layer": 2, "vocab_size": 103},
    "opt": {
        "num_attention_heads": 4,
        "hidden_size": 32,
        "ffn_dim": 44,
        "num_hidden_layers": 2,
        "vocab_size": 103,
        "dropout": 0.0,
        "attention_dropout": 0.0,
        "word_embed_proj_dim": 24,
        "max_position_embeddings": 64,
    },
    "phi": {**_USUAL, "num_key_value_heads": 4, "qk_layernorm": True},
    "gpt2": {**_GPT2, **_NO_DROP},
    "gpt_bigcode": {**_GPT2, **_NO_DROP, "multi_query": True},
    "gpt_bigcode_heads": {**_GPT2, **_NO_DROP, "model_type": "gpt_bigcode", "multi_query": False},
    "mixtral": {**_USUAL, "num_local_experts": 4, "num_experts_per_tok": 2},
    "mixtral_aux_loss": {
        **_USUAL,
        "model_type": "mixtral",
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "output_router_logits": True,
        "router_aux_loss_coef": 0.1,
    },
    "qwen2_moe": {**_USUAL, **_MOE, "shared_expert_intermediate_size": 28},
    "qwen3_moe": {**_USUAL, **_MOE, "head_dim": 16},
    "gemma": {**_USUAL, "num_key_value_heads": 1, "head_dim": 16},
    "gemma2": {**_USUAL, "head_dim": 16},
    "gemma3_text": {**_USUAL, "head_dim": 16},
    "mistral": _USUAL,
    "mpt": {"d_model": 32, "n_heads": 4, "n_layers": 2, "vocab_size": 103},
    "dbrx": {
        "d_model": 32,
        "n_heads": 4,
        "n_layers": 2,
        "vocab_size": 103,
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 20, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 32},
    },
    "stablelm": {**_USUAL, **_NO_DROPOUT},
    "olmo2": _USUAL,
    "deepseek_v2": {
        **_USUAL,
        "num_key_value_heads": 4,
        "moe_intermediate_size": 20,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "head_dim": 8,
        "n_shared_experts": 1,
    },
}


def tiny_config(name: str, **changes: Any) -> Any:
    """The config called `name`, with changes."""
    values = {**CONFIGS[name], **changes}
    config = CONFIG_MAPPING[values.pop("model_type", name)](**values)
    for token in ("pad_token_id", "bos_token_id", "eos_token_id"):
        if isinstance(getattr(config, token, None), int) and getattr(config, token) >= config.vocab_size:
            setattr(config, token, 0)
    # The plain loop over experts works in every dtype.
    config._experts_implementation = "eager"
    return config


def tiny_model(name: str, seed: int = 0, dtype: torch.dtype = torch.float64, **changes: Any) -> nn.Module:
    """A model in training mode in which every weight matters: no bias is zero and no logits are nearly equal."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(tiny_config(name, **changes)).to(dtype).train()
    for parameter in model.parameters():
        with torch.no_grad():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.3)
            else:
                parameter.copy_(torch.randn_like(parameter) * parameter.shape[-1] ** -0.5)
    return model


def batch(vocab_size: int, seed: int = 1, rows: int = 2, length: int = 9) -> dict[str, Tensor]:
    """Tokens with padding on the right of the last row, and labels of which some are ignored."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, vocab_size, (rows, length), generator=generator)
    mask = torch.ones_like(ids)
    mask[-1, -2:] = 0
    labels = ids.masked_fill(mask == 0, -100)
    labels[0, :3] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}
