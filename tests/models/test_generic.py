"""Decoders without a family of ours, served through transformers' own module."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from phalanx import LLM, build_engine
from phalanx.distributed.group import Group
from phalanx.distributed.thread_group import run_threads
from phalanx.models import ModelConfigError
from phalanx.models.generic.proof import check_served_right
from phalanx.weights import WeightError

USUAL = {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_hidden_layers": 2,
    "vocab_size": 103,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SCALES = {"embedding_multiplier": 2.0, "attention_multiplier": 0.3, "residual_multiplier": 0.5, "logits_scaling": 3.0}
SERVED: dict[str, dict[str, Any]] = {
    "granite": {**USUAL, **SCALES},
    "cohere": {**USUAL, "logit_scale": 0.3},
    "cohere2": {**USUAL, "sliding_window": 8, "num_hidden_layers": 4},
    "starcoder2": {**USUAL, "sliding_window": 6},
    "smollm3": {**USUAL, "num_hidden_layers": 4},
    "olmoe": {**USUAL, "num_experts": 4, "num_experts_per_tok": 2},
    "glm": {**USUAL, "head_dim": 8},
}
SETTINGS = {
    "dtype": "float32",
    "device": "cpu",
    "num_blocks": 60,
    "block_size": 4,
    "max_model_len": 48,
    "max_num_batched_tokens": 32,
    "max_num_seqs": 4,
}


def saved(name: str, folder: Path, **changes: Any) -> Any:
    config = CONFIG_MAPPING[name](**{**SERVED.get(name, USUAL), **changes})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).float().eval()
    for parameter in model.parameters():
        scale = parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 0.3
        parameter.data = torch.randn_like(parameter) * scale + (parameter.dim() == 1)
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("name", SERVED)
def test_logits(name: str, world: int, tmp_path: Path) -> None:
    model = saved(name, tmp_path)
    ids = torch.randint(3, 103, (21,), generator=torch.Generator().manual_seed(1)).tolist()
    with torch.inference_mode():
        expected = model(input_ids=torch.tensor([ids])).logits[0]

    def rank(group: Group) -> Tensor:
        with build_engine(str(tmp_path), group=group, tensor_parallel_size=world, **SETTINGS) as engine:
            pieces = [ids[:7], ids[7:16], *([token] for token in ids[16:])]
            parts = [
                engine.put([1, 2] if n == 0 else [1], [p, [5, 6]] if n == 0 else [p], logits="all")
                for n, p in enumerate(pieces)
            ]
            return torch.cat([part[: len(piece)] for part, piece in zip(parts, pieces, strict=True)])

    for logits in run_threads(world, rank):
        assert (logits - expected).norm() <= 1e-5 * expected.norm()


def test_greedy_tokens_are_those_of_transformers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = saved("granite", tmp_path)
    prompts = [[5, 6, 7, 8, 9], [11, 12]]
    with LLM(str(tmp_path), **SETTINGS) as llm:
        outputs = llm.generate(prompts, max_tokens=8, ignore_eos=True)
    for prompt, output in zip(prompts, outputs, strict=True):
        expected = model.generate(torch.tensor([prompt]), max_new_tokens=8, min_new_tokens=8, do_sample=False)
        assert output.outputs[0].token_ids == expected[0, len(prompt) :].tolist()
    assert "generic path" in caplog.text


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("gpt_oss", {"num_local_experts": 4, "head_dim": 8}, "s_aux"),
        ("bloom", {}, "do not attend"),
        ("mamba", {}, "layers of type linear_attention|do not attend|cannot be built"),
        ("bert", {}, "later tokens"),
        (
            "granite",
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
            "depends on the length",
        ),
    ],
)
def test_what_cannot_be_served_right_is_refused(name: str, changes: dict, reason: str, tmp_path: Path) -> None:
    config = CONFIG_MAPPING[name](**{**(USUAL if name != "bloom" else {"hidden_size": 32, "n_head": 4}), **changes})
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict(), default=str))
    with pytest.raises(ModelConfigError, match=f"model_type '{name}' has no family of its own here.*({reason})"):
        build_engine(str(tmp_path), load_format="dummy", **SETTINGS)


class TokenMixer(LlamaForCausalLM):
    """Hands every token something of the one before, outside of attention."""

    def forward(self, input_ids: Tensor, **kwargs: Any) -> Any:
        embedded = self.model.embed_tokens(input_ids)
        mixed = embedded + torch.nn.functional.pad(embedded, (0, 0, 1, 0))[:, :-1]
        return super().forward(inputs_embeds=mixed, **kwargs)


@pytest.mark.parametrize("kind", [LlamaForCausalLM, TokenMixer])
def test_a_module_that_mixes_tokens_outside_of_attention_is_found(kind: type) -> None:
    with torch.device("meta"):
        module = kind(LlamaConfig(**USUAL))
    if kind is LlamaForCausalLM:
        check_served_right(module)
    else:
        with pytest.raises(ModelConfigError, match="do more with a sequence than attend"):
            check_served_right(module)


def test_missing_tensors_are_named(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    saved("granite", tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.0.mlp.up_prog.weight"] = tensors.pop("model.layers.0.mlp.up_proj.weight")
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(WeightError, match=r"mlp\.up_proj\.weight.*nearest.*up_prog"):
        build_engine(str(tmp_path), **SETTINGS)


def test_it_is_not_serialised(tmp_path: Path) -> None:
    saved("granite", tmp_path / "model")
    with build_engine(str(tmp_path / "model"), **SETTINGS) as engine, pytest.raises(WeightError, match="generic path"):
        engine.serialize(tmp_path / "served")
