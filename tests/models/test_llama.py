"""Every Llama variant equals transformers: one-shot, chunked, token by token, batched, at TP 1, 2 and 4."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from phalanx.distributed.group import Group
from phalanx.distributed.thread_group import run_threads
from phalanx.engine.build import build_engine
from phalanx.engine.inference_engine import InferenceEngine
from phalanx.models.hf_config import ModelConfigError
from tests.models.tiny import LONG, chunked, error, llama, llama_config, reference, save

TOLERANCE = 1e-4

SCALED = {"original_max_position_embeddings": 32, "rope_theta": 10000.0}
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 5000.0},
    "linear": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0},
    "llama3": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **SCALED},
    "yarn": {"rope_type": "yarn", "factor": 4.0, **SCALED},
    "yarn-mscale": {"rope_type": "yarn", "factor": 4.0, "mscale": 0.7, "mscale_all_dim": 0.4, **SCALED},
    "yarn-betas": {
        "rope_type": "yarn",
        "factor": 4.0,
        "beta_fast": 16,
        "beta_slow": 2,
        "truncate": False,
        "attention_factor": 1.3,
        **SCALED,
    },
    "longrope": {
        "rope_type": "longrope",
        "factor": 4.0,
        "short_factor": [1.0 + 0.05 * i for i in range(6)],
        "long_factor": [1.5 + 0.9 * i for i in range(6)],
        **SCALED,
    },
}
VARIANTS: dict[str, dict[str, Any]] = {
    "mha": {"num_key_value_heads": 4},
    "gqa": {},
    "mqa": {"num_key_value_heads": 1},
    "wide-head": {"head_dim": 20},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "tied": {"tie_word_embeddings": True},
    "uneven": {"num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 8, "hidden_size": 45},
    "gelu": {"hidden_act": "gelu"},
    **{f"rope-{name}": {"rope_parameters": rope} for name, rope in ROPES.items()},
}
LENGTH_DEPENDENT = ("rope-dynamic", "rope-longrope")


def put_in_chunks(engine: InferenceEngine, uid: int, ids: list[int], chunks: list[int]) -> torch.Tensor:
    found, start = [], 0
    for size in chunks:
        found.append(engine.put([uid], [ids[start : start + size]], logits="all"))
        start += size
    engine.flush(uid)
    return torch.cat(found)


PATTERNS = {
    "prompt and decode": [LONG - 6] + [1] * 6,
    "by 7": chunked(LONG, 7),
    "one-shot": [LONG],
    "by 64": chunked(LONG, 64),
    "by 1": [1] * LONG,
}
"""How a sequence is given; at TP 2 and 4 the first two, which read the cache in prompts and in decode steps."""


@pytest.mark.parametrize("variant", VARIANTS)
def test_equals_transformers(variant: str, tmp_path: Path) -> None:
    model = llama(llama_config(**VARIANTS[variant]))
    folder = save(model, tmp_path / "model")
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 131, (LONG,), generator=generator).tolist()
    if variant in LENGTH_DEPENDENT:
        expected = {name: reference(model, ids, chunks) for name, chunks in PATTERNS.items()}
    else:
        expected = dict.fromkeys(PATTERNS, reference(model, ids, [LONG]))

    def run(group: Group) -> dict[str, torch.Tensor]:
        settings = {"max_model_len": 128, "num_blocks": 40, "block_size": 8}
        engine = build_engine(folder, settings, group=group, tensor_parallel_size=group.size)
        names = list(PATTERNS)[: None if group.size == 1 else 2]
        return {name: put_in_chunks(engine, uid, ids, PATTERNS[name]) for uid, name in enumerate(names)}

    for world in (1, 2, 4):
        for rank, found in enumerate(run_threads(world, run)):
            for name, logits in found.items():
                assert error(logits, expected[name]) < TOLERANCE, (variant, world, rank, name)


@pytest.mark.parametrize("variant", ["gqa", *LENGTH_DEPENDENT])
def test_a_ragged_batch_equals_each_sequence_alone(variant: str, tmp_path: Path) -> None:
    model = llama(llama_config(**VARIANTS[variant]))
    engine = build_engine(save(model, tmp_path / "model"), max_model_len=128, num_blocks=60, block_size=8)
    generator = torch.Generator().manual_seed(2)
    lengths = [1, 5, 31, 33, 50, 64]
    texts = [torch.randint(0, 131, (length + 3,), generator=generator).tolist() for length in lengths]
    steps = [
        engine.put(range(len(texts)), [text[:length] for text, length in zip(texts, lengths, strict=True)]),
        *(
            engine.put(range(len(texts)), [[text[length + k]] for text, length in zip(texts, lengths, strict=True)])
            for k in range(3)
        ),
    ]
    for index, (text, length) in enumerate(zip(texts, lengths, strict=True)):
        alone = reference(model, text, [length, 1, 1, 1])[length - 1 :]
        found = torch.stack([step[index] for step in steps])
        assert error(found, alone) < TOLERANCE


@pytest.mark.parametrize("heads", [1, 2, 4])
@pytest.mark.parametrize("vocab", [130, 131])
def test_kv_heads_and_odd_vocabularies_at_every_tp_size(heads: int, vocab: int, tmp_path: Path) -> None:
    model = llama(llama_config(num_key_value_heads=heads, vocab_size=vocab))
    folder = save(model, tmp_path / "model")
    ids = list(range(1, 30))
    expected = reference(model, ids, [len(ids)])

    def run(group: Group) -> torch.Tensor:
        engine = build_engine(folder, group=group, tensor_parallel_size=group.size, num_blocks=20)
        return engine.put([0], [ids], logits="all")

    for world in (1, 2, 4, 8):
        for found in run_threads(world, run):
            assert found.shape == (len(ids), vocab)
            assert error(found, expected) < TOLERANCE


@pytest.mark.parametrize("name", ["default", "linear", "dynamic", "llama3", "yarn", "longrope"])
def test_old_and_new_spellings_of_a_config_mean_the_same(name: str, tmp_path: Path) -> None:
    model = llama(llama_config(rope_parameters=ROPES[name]))
    folder = save(model, tmp_path / "model")
    path = folder / "config.json"
    config = json.loads(path.read_text())
    rope = dict(config.pop("rope_parameters"))
    config["rope_theta"] = rope.pop("rope_theta")
    config["torch_dtype"] = config.pop("dtype")
    rope["type"] = rope.pop("rope_type")
    if name != "default":
        config["rope_scaling"] = rope
    path.write_text(json.dumps(config))
    ids = torch.arange(2, 2 + LONG).tolist()
    engine = build_engine(folder, max_model_len=128, num_blocks=40)
    assert error(engine.put([0], [ids], logits="all"), reference(model, ids, [LONG])) < TOLERANCE


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("stored", [True, False])
def test_tied_and_stored_heads(tied: bool, stored: bool, tmp_path: Path) -> None:
    model = llama(llama_config())
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    if not stored:
        del tensors["lm_head.weight"]
    config = {**model.config.to_dict(), "tie_word_embeddings": tied}
    if not tied and not stored:
        with pytest.raises(ValueError, match=r"missing: lm_head\.weight"):
            build_engine(tensors, hf_config=config, num_blocks=20)
        return
    if tied:
        model.lm_head.weight = model.model.embed_tokens.weight
    expected = reference(model, [3, 4, 5], [3])

    def run(group: Group) -> torch.Tensor:
        settings = {"tensor_parallel_size": group.size, "num_blocks": 20}
        return build_engine(tensors, settings, hf_config=config, group=group).put([0], [[3, 4, 5]], logits="all")

    for world in (1, 2):
        for found in run_threads(world, run):
            assert error(found, expected) < TOLERANCE


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_parameters": {"rope_type": "sinusoid", "rope_theta": 1e4}}, "rope type 'sinusoid' is unknown"),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4}}, "needs `factor`"),
        ({"rope_parameters": {**ROPES["longrope"], "long_factor": [1.0]}}, "has 1 numbers, expected"),
        ({"hidden_act": "swishish"}, "unknown activation 'swishish'"),
        ({"num_key_value_heads": 3}, "do not divide"),
        ({"num_hidden_layers": 0}, "num_layers must be at least 1"),
        ({"model_type": "llamo"}, "model_type 'llamo' is not served; did you mean llama"),
        ({"dtype": "float8"}, "dtype 'float8' is not one of"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    config = {**llama_config().to_dict(), **changes}
    with pytest.raises((ModelConfigError, ValueError), match=message):
        build_engine({}, hf_config=config, num_blocks=8)


def test_bf16_stays_within_its_rounding(tmp_path: Path) -> None:
    model = llama(llama_config())
    ids = list(range(1, 31))
    expected = reference(model, ids, [30])
    found = build_engine(save(model, tmp_path / "m"), dtype="bfloat16", num_blocks=20).put([0], [ids], logits="all")
    assert 1e-5 < error(found, expected) < 0.05 and math.isfinite(float(found.sum()))
