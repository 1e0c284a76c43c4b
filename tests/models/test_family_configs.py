"""Configs of the families: old spellings mean the same, what is not supported is refused by name, faulty checkpoints
too; and what only some families have."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    Exaone4_5_Config,
    Exaone4_5_ForConditionalGeneration,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
)

from phalanx.distributed.group import Group
from phalanx.distributed.thread_group import run_threads
from phalanx.engine.build import build_engine
from tests.models.families import BASE, FULL, LENGTH, SLIDING, WINDOW, config_of, folder_of, module_of
from tests.models.tiny import error, randomize, reference, save

IDS = torch.randint(3, 131, (LENGTH,), generator=torch.Generator().manual_seed(1)).tolist()


def logits(source: Any, **settings: Any) -> torch.Tensor:
    return build_engine(source, **{"device": "cpu", "num_blocks": 60, "block_size": 8, **settings}).put(
        [0], [IDS], logits="all"
    )


# -- old spellings


def old_rope(config: dict[str, Any]) -> None:
    """``rope_theta``, ``partial_rotary_factor`` and ``rope_scaling`` beside each other; ``torch_dtype``."""
    config["torch_dtype"] = config.pop("dtype")
    rope = config.pop("rope_parameters")
    for key in ("rope_theta", "partial_rotary_factor"):
        if key in rope:
            config[key] = rope.pop(key)
    rope["type"] = rope.pop("rope_type")
    if rope["type"] != "default":
        config["rope_scaling"] = rope


def old_neox(config: dict[str, Any]) -> None:
    old_rope(config)
    config["rotary_emb_base"] = config.pop("rope_theta")
    config["rotary_pct"] = config.pop("partial_rotary_factor")


def old_phi3(config: dict[str, Any]) -> None:
    old_rope(config)
    scaling = config["rope_scaling"]
    config["original_max_position_embeddings"] = scaling.pop("original_max_position_embeddings", 16)
    scaling["type"] = "su"


def old_layers(config: dict[str, Any]) -> None:
    old_rope(config)
    del config["layer_types"]


def old_gemma3(config: dict[str, Any]) -> None:
    del config["layer_types"]
    ropes = config.pop("rope_parameters")
    config["rope_theta"], config["rope_local_base_freq"] = (ropes[kind]["rope_theta"] for kind in (FULL, SLIDING))
    config["sliding_window_pattern"] = 6
    if ropes[FULL]["rope_type"] != "default":
        config["rope_scaling"] = {"rope_type": ropes[FULL]["rope_type"], "factor": ropes[FULL]["factor"]}


def old_exaone(config: dict[str, Any]) -> None:
    old_layers(config)
    config["sliding_window_pattern"] = "LLLG"


OLD: dict[str, Callable[[dict[str, Any]], None]] = {
    "mistral:yarn-tied": old_rope,
    "qwen2:windows-above-1": old_layers,
    "qwen3:windows": old_layers,
    "gpt_neox:half-rotated": old_neox,
    "phi:wholly-rotated": old_rope,
    "stablelm:plain": old_rope,
    "phi3:longrope": old_phi3,
    "phi3:longrope-partly-rotated": old_phi3,
    "gemma2:plain": old_layers,
    "gemma3_text:six-layers": old_gemma3,
    "olmo2:multi-query": old_rope,
    "exaone4:pattern": old_exaone,
    "falcon:multi-head-rope": old_rope,
}


@pytest.mark.parametrize("case", OLD)
def test_old_spellings_mean_the_same(case: str, tmp_path: Path) -> None:
    module, folder = folder_of(case, tmp_path)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    OLD[case](config)
    path.write_text(json.dumps(config))
    assert error(logits(folder), reference(module, IDS, [LENGTH])) < 1e-4


# -- refusals

REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("mistral:window", {"layer_types": [SLIDING, FULL]}, "layer_types that differ"),
    ("mistral:window", {"sliding_window": 0}, "window of 0 tokens"),
    ("qwen2:plain", {"layer_types": ["chunked_attention"] * 2}, "layer type 'chunked_attention' is not supported"),
    ("qwen2:plain", {"layer_types": [FULL]}, "lists 1 layer_types for 2 layers"),
    ("qwen3:plain", {"hidden_act": "swishish"}, "unknown activation 'swishish'"),
    ("gpt2:plain", {"add_cross_attention": True}, "add_cross_attention"),
    ("gemma2:plain", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
    ("phi3:fused", {"rope_scaling": {"type": "sinusoid"}, "rope_parameters": None}, "rope type 'sinusoid'"),
    (
        "gemma3_text:two-ropes",
        {"rope_parameters": {SLIDING: {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}},
        "rope type 'dynamic' in some layers beside another",
    ),
    (
        "stablelm:plain",
        {"quantization_config": {"quant_method": "bitsandbytes"}},
        "'bitsandbytes' is not read; known are fp8",
    ),
]


@pytest.mark.parametrize(("case", "changes", "message"), REFUSED)
def test_what_is_not_supported_is_refused_by_name(case: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_engine({}, hf_config={**config_of(case).to_dict(), **changes}, num_blocks=8)


# -- checkpoints

FAULTY = {
    "gpt2:plain": ("transformer.h.1.attn.c_attn.weight", "attn.c_attn.weight"),
    "opt:norm-after": ("model.decoder.project_in.weight", "*decoder.project_in.weight"),
    "falcon:grouped": ("transformer.h.0.ln_mlp.bias", "ln_mlp.bias"),
    "stablelm:normed-heads": ("model.layers.1.self_attn.q_layernorm.norms.2.weight", "q_layernorm.norms"),
    "olmo2:plain": ("model.layers.0.self_attn.k_norm.weight", "self_attn.k_norm.weight"),
    "phi3:fused": ("model.layers.0.mlp.gate_up_proj.weight", "mlp.gate_up_proj.weight"),
    "gemma3_text:two-ropes": ("model.layers.1.pre_feedforward_layernorm.weight", "pre_feedforward_layernorm.weight"),
    "exaone4:hybrid": ("model.layers.1.post_feedforward_layernorm.weight", "post_feedforward_layernorm.weight"),
}


@pytest.mark.parametrize("case", FAULTY)
def test_a_faulty_checkpoint_is_refused(case: str) -> None:
    module = module_of(case)
    config, tensors = module.config.to_dict(), module.state_dict()
    name, near = FAULTY[case]

    def refused(changed: dict[str, torch.Tensor], *messages: str) -> None:
        with pytest.raises(ValueError) as caught:
            build_engine(changed, hf_config=config, num_blocks=8)
        assert all(message in str(caught.value) for message in messages), str(caught.value)

    rest = {key: tensor for key, tensor in tensors.items() if key != name}
    absent = f"missing: {near if near.startswith('*') else name}"
    refused(rest, absent)
    refused({**rest, f"{name}s": tensors[name]}, f"unknown tensor '{name}s'", near, absent)
    refused({**tensors, f"{name}s": tensors[name]}, f"unknown tensor '{name}s'")
    refused({**rest, name: tensors[name][:-1]}, f"wrong shape: {name} is {tuple(tensors[name][:-1].shape)}")


def test_gpt2_without_a_prefix_and_with_its_masks() -> None:
    module = module_of("gpt2:scaled")
    tensors = {name.removeprefix("transformer."): tensor for name, tensor in module.transformer.state_dict().items()}
    masks = {f"h.{layer}.attn.bias": torch.ones(1, 1, 64, 64) for layer in (0, 1)}
    found = logits({**tensors, **masks}, hf_config=module.config.to_dict())
    assert error(found, reference(module, IDS, [LENGTH])) < 1e-4


# -- what only some have


def exaone() -> Any:
    text = {**BASE, "model_type": "exaone4", "sliding_window": WINDOW, "layer_types": [SLIDING, FULL]}
    vision = {"depth": 1, "hidden_size": 32, "num_heads": 4, "num_key_value_heads": 2, "intermediate_size": 32}
    vision |= {"out_hidden_size": 48, "fullatt_block_indexes": [0]}
    config = Exaone4_5_Config(text_config=text, vision_config=vision, tie_word_embeddings=False)
    return Exaone4_5_ForConditionalGeneration(config)


def gemma() -> Any:
    text = {**BASE, "head_dim": 12, "sliding_window": WINDOW, "layer_types": [SLIDING, FULL]}
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"image_size": 28, "patch_size": 14}
    text["tie_word_embeddings"] = True
    config = Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4, tie_word_embeddings=True)
    return Gemma3ForConditionalGeneration(config)


@pytest.mark.parametrize("make", [exaone, gemma])
@pytest.mark.parametrize("saved", [True, False])
def test_the_text_part_of_a_multimodal_model(make: Callable[[], Any], saved: bool, tmp_path: Path) -> None:
    module = randomize(make().float())
    expected = reference(module, IDS, [LENGTH])
    source = save(module, tmp_path) if saved else module

    def run(group: Group) -> torch.Tensor:
        return logits(source, group=group, tensor_parallel_size=group.size)

    for world in (1, 2):
        for found in run_threads(world, run):
            assert error(found, expected) < 1e-4


def test_a_kernel_without_alibi_is_bypassed_or_refused(tmp_path: Path) -> None:
    _, folder = folder_of("falcon:rw", tmp_path)
    chosen = logits(folder)
    assert torch.equal(chosen, logits(folder, ops={"attention": "reference"}))
    from phalanx.ops import registry
    from phalanx.ops.attention import reference_attention

    registry.register(
        "attention", "mine", lambda *args, **settings: reference_attention(*args, **settings), priority=-1
    )
    try:
        with pytest.raises(ValueError, match=r"attention: 'mine' does not support torch\.float32 on cpu with key_bias"):
            logits(folder, ops={"attention": "mine"})
    finally:
        registry.unregister("attention", "mine")


@pytest.mark.parametrize("case", ["gemma2:plain", "opt:norm-first", "olmo2:plain", "falcon:rw"])
def test_bf16_and_a_serialized_checkpoint(case: str, tmp_path: Path) -> None:
    module, folder = folder_of(case, tmp_path / "model")
    engine = build_engine(folder, dtype="bfloat16", num_blocks=60, block_size=8)
    found = engine.put([0], [IDS], logits="all")
    assert error(found, reference(copy.deepcopy(module), IDS, [LENGTH])) < 0.1
    engine.serialize(tmp_path / "served")
    again = build_engine(tmp_path / "served", dtype="bfloat16", num_blocks=60, block_size=8)
    assert torch.equal(again.put([0], [IDS], logits="all"), found)
