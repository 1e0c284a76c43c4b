"""Models are trained a step on ranks and exported: stock transformers must compute the same logits from the folder."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

import phalanx
from phalanx.training.checkpoint_folder import CheckpointError
from tests.parallel.models import tiny_model
from tests.training.family_cases import FACTORS, build, language_loss, possible, sgd
from tests.training.pairwise import Row, pairwise

CHOSEN: dict[str, list[Any]] = {name: FACTORS[name] for name in ("family", "tp", "stage", "kv_heads", "vocab_size")} | {
    "tied": [None, True]
}


def folder() -> Path:
    return Path(sys.argv[3])


def engine_of(model: nn.Module, tp: int, stage: int, **more: Any) -> Any:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 3000},
        "zero_allow_untested_optimizer": True,
        "tensor_parallel": {"autotp_size": tp},
        **more,
    }
    return phalanx.initialize(model=model, optimizer=sgd(model), config=config)[0]


def tokens(vocab_size: int, seed: int = 3) -> Tensor:
    return torch.randint(0, vocab_size, (2, 7), generator=torch.Generator().manual_seed(seed))


def trained(model: nn.Module, tp: int, stage: int, **more: Any) -> Any:
    vocab_size = model.config.get_text_config().vocab_size  # type: ignore[union-attr,operator]
    engine = engine_of(model, tp, stage, **more)
    engine.train()
    engine.backward(language_loss(engine, tokens(vocab_size, engine.mesh.dp.rank)))
    engine.step()
    engine.eval()
    return engine


def logits_of(engine: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = engine(input_ids=tokens(engine.module.config.vocab_size)).logits
    return found


def check_folder(path: Path, expected: Tensor, vocab_size: int, atol: float = 1e-5) -> None:
    again, told = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
    assert not any(told[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), told
    with torch.no_grad():
        torch.testing.assert_close(again(input_ids=tokens(vocab_size)).logits, expected, rtol=1e-5, atol=atol)


def check(row: Row) -> None:
    engine = trained(build({"kv_heads": None, "tied": None, **row}), row["tp"], row["stage"])
    expected = logits_of(engine)
    path = folder() / "-".join(map(str, row.values()))
    engine.save_pretrained(path, max_shard_size="20KB")
    if dist.get_rank() == 0:
        assert (path / "model.safetensors.index.json").is_file()
        check_folder(path, expected, row["vocab_size"])
    dist.barrier()
    engine.destroy()
    if row["stage"] < 3:
        engine.mesh.close()


def bf16_with_tokenizer() -> None:
    class Tokenizer:
        def save_pretrained(self, path: Any) -> None:
            Path(path, "tokenizer.json").write_text("{}")

    model = tiny_model("llama_tied", dtype=torch.float32)
    model.generation_config.max_new_tokens = 17  # type: ignore[union-attr]
    engine = trained(model, 2, 3 if dist.get_world_size() == 4 else 1, bf16={"enabled": True})
    expected = logits_of(engine)
    path = folder() / "bf16"
    if dist.get_rank() == 0:
        path.mkdir()
        (path / "mine.txt").write_text("stays")
        (path / "model-00001-of-00002.safetensors").write_text("of an earlier model")
    engine.save_pretrained(path, Tokenizer())
    if dist.get_rank() == 0:
        assert sorted(p.name for p in path.iterdir()) == [
            "config.json",
            "generation_config.json",
            "mine.txt",
            "model.safetensors",
            "tokenizer.json",
        ]
        assert json.loads((path / "config.json").read_text())["dtype"] == "bfloat16"
        assert json.loads((path / "generation_config.json").read_text())["max_new_tokens"] == 17
        assert "lm_head.weight" not in load_file(path / "model.safetensors")
        # The ranks' sums are rounded in another order.
        check_folder(path, expected, 103, atol=0.1)
    dist.barrier()
    engine.destroy()


def weights_alone() -> None:
    model = tiny_model("gpt2", dtype=torch.float32)
    model.register_buffer("counted", torch.arange(3))
    model.transformer.wte.weight.requires_grad_(False)  # type: ignore[union-attr]
    engine = trained(model, 2, 1)
    for number, (given, expected) in enumerate({"pytorch_model.bin": "model", "mine.safetensors": "mine"}.items()):
        path = folder() / f"weights{number}"
        assert engine.save_16bit_model(path, given, exclude_frozen_parameters=bool(number))
        if dist.get_rank() == 0:
            assert [p.name for p in path.iterdir()] == [f"{expected}.safetensors"]
            found = load_file(path / f"{expected}.safetensors")
            assert torch.equal(found["counted"], torch.arange(3))
            assert ("transformer.wte.weight" in found) == (number == 0)
    state = engine._consolidated_16bit_state_dict()
    if dist.get_rank():
        assert state is None
    else:
        again = tiny_model("gpt2", dtype=torch.float32)
        again.register_buffer("counted", torch.zeros(3, dtype=torch.int64))
        again.load_state_dict(state)  # all names, and no more
        assert state["lm_head.weight"].data_ptr() == state["transformer.wte.weight"].data_ptr()
        assert state["transformer.h.0.attn.c_attn.weight"].shape == (32, 96)
    with pytest.raises(ValueError, match="name of a file"):
        engine.save_16bit_model(folder(), "a/b.bin")
    with pytest.raises(ValueError, match="max_shard_size"):
        engine.save_pretrained(folder() / "x", max_shard_size="many")
    engine.destroy()


def failing_writer() -> None:
    engine = trained(tiny_model("llama", dtype=torch.float32), 2, 1)

    class Broken:
        def save_pretrained(self, path: Any) -> None:
            raise OSError("No space left on device")

    error = OSError if dist.get_rank() == 0 else CheckpointError
    with pytest.raises(error, match=r"No space left|another rank has failed"):
        engine.save_pretrained(folder() / "broken", Broken())
    assert not (folder() / "broken").exists()
    logits_of(engine)  # the ranks are in step still
    engine.destroy()


def gathered(stage: int, **more: Any) -> None:
    """What one rank changes, all ranks train on, in their master values too."""
    model = tiny_model("qwen3", dtype=torch.float32, num_key_value_heads=1, vocab_size=1003)
    model.lm_head.weight.requires_grad_(False)  # type: ignore[union-attr]
    engine = trained(model, 2, stage, **more)
    world = dist.get_world_size()
    names = ["model.layers.0.self_attn.k_proj.weight", "model.layers.0.self_attn.q_norm.weight", "lm_head.weight"]
    before = engine._consolidated_16bit_state_dict()
    with engine.gathered_parameters([*names, "model.norm.weight"], modifier_rank=world - 1) as whole:
        assert [tuple(t.shape) for t in whole.values()] == [(16, 32), (16,), (1003, 32), (32,)]
        if before is not None:
            for name, value in whole.items():
                torch.testing.assert_close(value.to(before[name].dtype), before[name], rtol=0, atol=0)
        for name in names:
            whole[name][...] = 0.25 if dist.get_rank() == world - 1 else 9.0
    after = engine._consolidated_16bit_state_dict()
    if after is not None and before is not None:
        for name, value in after.items():
            expected = torch.full_like(value, 0.25) if name in names else before[name]
            assert torch.equal(value, expected), name
    for fragment in engine.fragments:
        if fragment.name in names:
            assert bool((fragment.tensor == 0.25).all())
    with engine.gathered_parameters(names[0]) as whole:
        whole[names[0]].zero_()
    with engine.gathered_parameters(names[0]) as whole:
        assert bool((whole[names[0]] == 0.25).all())
    with pytest.raises(ValueError, match="no parameter"), engine.gathered_parameters(["lm_head"]):
        pass
    engine.destroy()


def cases(world: int) -> dict[str, Callable[[], None]]:
    tps = [tp for tp in CHOSEN["tp"] if tp <= world]
    factors = {**CHOSEN, "tp": tps}
    found: dict[str, Callable[[], None]] = {}
    for row in pairwise(factors, possible):
        found[str(row)] = partial(check, row)
    found["bf16 with a tokenizer"] = bf16_with_tokenizer
    found["weights alone"] = weights_alone
    found["a writer that fails"] = failing_writer
    for stage in (0, 2, 3):
        found[f"gathered at stage {stage}"] = partial(gathered, stage)
    found["gathered in bf16"] = partial(gathered, 1, bf16={"enabled": True})
    return found
