"""The variants of every family that the tests serve: what they change in a small config of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoModelForCausalLM

from tests.models.tiny import randomize, save

LENGTH = 40
WINDOW = 9

BASE = {
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 70,
    "vocab_size": 131,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
MHA = {"num_key_value_heads": None}
WIDER = {"hidden_size": 64}  # a quarter of a head of 16 is an even number
SLIDING, FULL = "sliding_attention", "full_attention"
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 5000.0}
LINEAR = {"rope_type": "linear", "factor": 4.0, "rope_theta": 5000.0}
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 5000.0}

NEOX = {**MHA, **WIDER}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0 + 0.05 * i for i in range(6)],
    "long_factor": [1.5 + 0.9 * i for i in range(6)],
    "rope_theta": 10000.0,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
    "rope_theta": 10000.0,
}
GEMMA = {"head_dim": 12, "query_pre_attn_scalar": 20, "sliding_window": WINDOW}
FALCON = {"num_key_value_heads": None, "multi_query": True, "parallel_attn": True}
OPT = {"ffn_dim": 70, "word_embed_proj_dim": 48, **MHA}
GPT2 = {"n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": 131, "bos_token_id": 1}
WINDOWS = {"use_sliding_window": True, "sliding_window": WINDOW}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 22}
SHARED = {**EXPERTS, "shared_expert_intermediate_size": 30}

VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "mistral": {
        "window": {"sliding_window": WINDOW},
        "no-window": {"sliding_window": None, "head_dim": 20, "num_key_value_heads": 1},
        "yarn-tied": {"sliding_window": None, "rope_parameters": YARN, "tie_word_embeddings": True},
    },
    "qwen2": {
        "plain": {},
        "windows-above-1": {**WINDOWS, "max_window_layers": 1},
        "windows-listed": {**WINDOWS, "layer_types": [SLIDING, FULL]},
        "window-unused": {"use_sliding_window": False, "sliding_window": WINDOW, "max_window_layers": 0},
        "dynamic": {"max_position_embeddings": 16, "rope_parameters": DYNAMIC},
        "tied-yarn": {"tie_word_embeddings": True, "rope_parameters": YARN},
    },
    "qwen3": {
        "plain": {"head_dim": 12},
        "wide-head": {"head_dim": 20, "attention_bias": True},
        "windows": {"head_dim": 12, **WINDOWS, "max_window_layers": 1},
    },
    "mixtral": {
        "window": {"num_local_experts": 5, "sliding_window": WINDOW, "intermediate_size": 26},
        "one-of-four": {"num_local_experts": 4, "num_experts_per_tok": 1, "num_key_value_heads": 1, "head_dim": 20},
        "yarn-tied": {"num_local_experts": 3, "rope_parameters": YARN, "tie_word_embeddings": True, "head_dim": 12},
    },
    "qwen2_moe": {
        "some-dense": {**SHARED, "num_hidden_layers": 3, "mlp_only_layers": [1]},
        "normalised": {**SHARED, "norm_topk_prob": True, "num_key_value_heads": 1, "hidden_act": "gelu"},
        "windows": {**SHARED, **WINDOWS, "num_hidden_layers": 3, "max_window_layers": 3, "decoder_sparse_step": 2},
        "narrow": {**SHARED, "moe_intermediate_size": 3, "shared_expert_intermediate_size": 5, "qkv_bias": False},
    },
    "qwen3_moe": {
        "plain": {**EXPERTS, "head_dim": 12},
        "normalised": {**EXPERTS, "norm_topk_prob": True, "head_dim": 20, "attention_bias": True},
        "sparse-steps": {
            **EXPERTS,
            **WINDOWS,
            "num_hidden_layers": 4,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [1],
        },
        "all-dense": {**EXPERTS, "mlp_only_layers": [0, 1], "num_key_value_heads": 1},
        "yarn-all-experts": {**EXPERTS, "num_experts_per_tok": 6, "rope_parameters": YARN},
    },
    "gpt_neox": {
        "parallel": NEOX,
        "sequential": {**NEOX, "use_parallel_residual": False, "hidden_act": "gelu_new"},
        "no-bias": {**NEOX, "attention_bias": False},
        "half-rotated": {**NEOX, "rope_parameters": {"rope_theta": 500.0, "partial_rotary_factor": 0.5}},
        "linear-rope": {**NEOX, "rope_parameters": {**LINEAR, "partial_rotary_factor": 1.0}},
    },
    "gpt2": {
        "plain": GPT2,
        "scaled": {**GPT2, "scale_attn_by_inverse_layer_idx": True, "n_inner": 70, "tie_word_embeddings": True},
        "unscaled": {**GPT2, "scale_attn_weights": False, "activation_function": "relu"},
    },
    "phi": {
        "plain": {},
        "normed-heads": {"qk_layernorm": True, "num_key_value_heads": None},
        "wholly-rotated": {"rope_parameters": {"rope_theta": 500.0, "partial_rotary_factor": 1.0}},
    },
    "opt": {
        "norm-first": OPT,
        "norm-after": {**OPT, "do_layer_norm_before": False, "word_embed_proj_dim": 32},
        "narrow-tied": {**OPT, "word_embed_proj_dim": 32, "tie_word_embeddings": True},
        "no-bias": {**OPT, "enable_bias": False, "activation_function": "gelu"},
        "no-affine": {**OPT, "layer_norm_elementwise_affine": False},
        "no-final-norm": {**OPT, "_remove_final_layer_norm": True},
    },
    "stablelm": {
        "plain": WIDER,
        "parallel": {**WIDER, "use_parallel_residual": True, "use_qkv_bias": True},
        "normed-heads": {**WIDER, "qk_layernorm": True},
        "parallel-normed-heads": {
            **WIDER,
            "qk_layernorm": True,
            "use_parallel_residual": True,
            "num_key_value_heads": 4,
        },
    },
    "phi3": {
        "fused": {},
        "window": {"sliding_window": WINDOW, "num_key_value_heads": 4, "tie_word_embeddings": True},
        "longrope": {"original_max_position_embeddings": 16, "rope_parameters": LONGROPE},
        "longrope-partly-rotated": {
            **WIDER,
            "original_max_position_embeddings": 16,
            "rope_parameters": {**LONGROPE, "partial_rotary_factor": 0.75},
        },
    },
    "gemma2": {
        "plain": {**GEMMA, "final_logit_softcapping": 3.0, "attn_logit_softcapping": 2.0},
        "uncapped": {**GEMMA, "final_logit_softcapping": None, "attn_logit_softcapping": None},
        "tied": {**GEMMA, "tie_word_embeddings": True, "attention_bias": True, "attn_logit_softcapping": 2.0},
    },
    "gemma3_text": {
        "two-ropes": {**GEMMA, "layer_types": [SLIDING, FULL]},
        "six-layers": {**GEMMA, "num_hidden_layers": 6, "tie_word_embeddings": True},
        "scaled": {
            **GEMMA,
            "layer_types": [SLIDING, FULL],
            "rope_parameters": {FULL: LINEAR, SLIDING: {"rope_type": "default", "rope_theta": 300.0}},
            "final_logit_softcapping": 3.0,
        },
    },
    "olmo2": {
        "plain": {},
        "multi-head": {"num_key_value_heads": None, "attention_bias": True},
        "multi-query": {"num_key_value_heads": 1, "rope_parameters": YARN},
    },
    "exaone4": {
        "hybrid": {"sliding_window": WINDOW, "layer_types": [SLIDING, FULL], "head_dim": 20},
        "pattern": {"sliding_window": WINDOW, "sliding_window_pattern": 4, "num_hidden_layers": 4},
        "global": {"sliding_window": None, "layer_types": [FULL, FULL], "tie_word_embeddings": True},
        "llama3-rope": {"sliding_window": WINDOW, "layer_types": [SLIDING, FULL], "rope_parameters": LLAMA3},
    },
    "falcon": {
        "multi-query": {**FALCON},
        "grouped": {**FALCON, "new_decoder_architecture": True, "num_kv_heads": 2, "bias": True},
        "grouped-one-norm": {
            **FALCON,
            "new_decoder_architecture": True,
            "num_kv_heads": 2,
            "num_ln_in_parallel_attn": 1,
        },
        "rw": {**FALCON, "multi_query": False, "parallel_attn": False, "alibi": True, "bias": True},
        "six-heads-alibi": {**FALCON, "num_attention_heads": 6, "alibi": True, "tie_word_embeddings": True},
        "multi-head-rope": {**FALCON, "multi_query": False, "ffn_hidden_size": 70, "activation": "relu"},
    },
}

CASES = [f"{family}:{variant}" for family, variants in VARIANTS.items() for variant in variants]


def config_of(case: str) -> Any:
    """transformers' config of ``family:variant``."""
    family, _, variant = case.partition(":")
    values = {**BASE, **VARIANTS[family][variant]}
    return AutoConfig.for_model(
        family, **{key: value for key, value in values.items() if key not in ABSENT.get(family, ())}
    )


ABSENT = {"gpt2": [key for key in BASE if key not in GPT2 and key not in ("tie_word_embeddings", "eos_token_id")]}
"""Values of BASE that a family calls otherwise."""


ATTENTION = {"falcon": "sdpa"}
"""transformers' attention: eager, the only one with soft caps. Falcon's eager one adds ALiBi twice."""


def module_of(case: str) -> Any:
    """transformers' module, random, in fp32. Experts are the eager ones: the only ones that take every width."""
    how = {"attn_implementation": ATTENTION.get(case.partition(":")[0], "eager"), "experts_implementation": "eager"}
    return randomize(AutoModelForCausalLM.from_config(config_of(case), **how).float())


def folder_of(case: str, folder: Path) -> tuple[Any, Path]:
    """The module, and the folder that it was saved in."""
    module = module_of(case)
    return module, save(module, folder)
