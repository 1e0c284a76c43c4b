"""Every trait equals transformers on a model that has it, declared in declared.py, at TP 1, 2 and 4."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from phalanx.distributed.group import Group
from phalanx.distributed.thread_group import run_threads
from phalanx.engine.build import build_engine
from phalanx.models import DeclarationError, LayerContainer, ModelConfigError
from phalanx.models.llama import LlamaLayer, LlamaOuter
from phalanx.models.parameters import NormParameter
from tests.models.declared import TOYS
from tests.models.kit import bare_model, stub
from tests.models.tiny import error, llama_config, randomize, reference, save

SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 70,
    "vocab_size": 131,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
FULL = {"layer_types": ["full_attention"] * 2}
CONFIGS: dict[str, dict[str, Any]] = {
    "gpt_neox": {"num_key_value_heads": None},
    "gpt_neox-sequential": {"num_key_value_heads": None, "use_parallel_residual": False},
    "phi": {},
    "opt": {"ffn_dim": 70, "word_embed_proj_dim": 64, "num_key_value_heads": None},
    "qwen3": {"head_dim": 12},
    "exaone4": {"head_dim": 16, "sliding_window": None, "sliding_window_pattern": None, **FULL},
    "gemma2": {
        "head_dim": 12,
        "query_pre_attn_scalar": 20,
        "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention"],
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
    },
}


def checkpoint(name: str, folder: Path) -> tuple[Any, dict[str, Any]]:
    """transformers' module of a config, saved in a folder, and the config of the toy that serves it."""
    model_type = name.partition("-")[0]
    config = AutoConfig.for_model(model_type, **{**SIZES, **CONFIGS[name]})
    module = randomize(AutoModelForCausalLM.from_config(config, attn_implementation="eager"))
    save(module, folder)
    return module, {**config.to_dict(), "model_type": f"toy_{model_type}"}


@pytest.mark.parametrize("name", CONFIGS)
def test_equals_transformers(name: str, policies: dict[str, Any], tmp_path: Path) -> None:
    policies.update(TOYS)
    module, config = checkpoint(name, tmp_path)
    ids = torch.arange(3, 27).tolist()
    chunks = [7, 1, 12, 1, 1, 2]
    expected = reference(module, ids, [len(ids)])

    def run(group: Group) -> torch.Tensor:
        engine = build_engine(tmp_path, hf_config=config, group=group, tensor_parallel_size=group.size, num_blocks=20)
        parts, start = [], 0
        for size in chunks:
            parts.append(engine.put([0], [ids[start : start + size]], logits="all"))
            start += size
        return torch.cat(parts)

    for world in (1, 2, 4):
        for found in run_threads(world, run):
            assert error(found, expected) < 1e-4, world


def test_a_position_beyond_the_learned_ones_is_refused(policies: dict[str, Any], tmp_path: Path) -> None:
    policies.update(TOYS)
    _, config = checkpoint("opt", tmp_path)
    with pytest.raises(ValueError, match="max_model_len=65 is above the model's 64 learned positions"):
        build_engine(tmp_path, hf_config=config, max_model_len=65, num_blocks=20)


class Misspelt(LlamaLayer):
    atn_post_norm: NormParameter
    PARAM_MAPPING = {"x": "atn_post_norm.params"}


class Unasked(LlamaLayer):
    q_norm: NormParameter
    PARAM_MAPPING = {"x": "q_norm.params"}


class BiasedNorm(LlamaLayer):
    attn_norm_bias: NormParameter
    PARAM_MAPPING = {"x": "attn_norm_bias.params"}


class UnaskedOuter(LlamaOuter):
    pos_emb: NormParameter
    PARAM_MAPPING = {"x": "pos_emb.params"}


@pytest.mark.parametrize(
    ("layer", "outer", "message"),
    [
        (
            Misspelt,
            LlamaOuter,
            r"Misspelt has atn_post_norm, which TransformerModel never reads; it reads attn_norm, .*",
        ),
        (
            Unasked,
            LlamaOuter,
            r"Unasked has q_norm, .* or add it to `layer_parameters` where a step of your own reads it",
        ),
        (BiasedNorm, LlamaOuter, r"BiasedNorm has attn_norm_bias, which"),  # an RMSNorm has none
        (LlamaLayer, UnaskedOuter, r"UnaskedOuter has pos_emb, .* or add it to `outer_parameters`"),
    ],
)
def test_a_parameter_that_nobody_reads_is_refused(
    layer: type[LayerContainer], outer: type[LayerContainer], message: str
) -> None:
    model = bare_model(llama_config().to_dict())
    with pytest.raises(DeclarationError, match=message):
        model.set_parameters([layer(model)], outer(model))


def test_an_unknown_norm_placement_is_refused() -> None:
    kind = type("Model", (TOYS["toy_gemma2"].model_class,), {"norm_placement": "middle", "activation": "silu"})
    with pytest.raises(ModelConfigError, match="norm_placement 'middle' is unknown: pre, post, sandwich"):
        bare_model(llama_config().to_dict(), stub(rank=0, size=1), kind)
