"""LoRA on ranks: the same adapter as in one process, however the layers beneath are cut."""

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
from peft import IA3Config, LoraConfig, PeftModel, PrefixTuningConfig, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM

import phalanx
from tests.parallel.models import tiny_model
from tests.training.family_cases import language_loss
from tests.training.loops import engine_loop, plain_loop
from tests.training.pairwise import Row, pairwise

STEPS = 5
ATTENTION_AND_MLP: dict[str, list[str]] = {
    "llama": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    "phi3": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"],
    "gpt_neox": ["query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"],
    "gpt2": ["c_attn", "c_proj", "c_fc"],
    "falcon_grouped": ["query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"],
    "qwen2_tied": ["q_proj", "v_proj", "down_proj"],
    "mixtral": ["q_proj", "k_proj", "v_proj", "o_proj"],
    "gemma2": ["q_proj", "k_proj", "v_proj", "o_proj", "embed_tokens"],
    "opt": ["q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2"],
}
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "ranks": {"rank_pattern": {".*v.*": 3}, "alpha_pattern": {".*o.*": 7}, "use_rslora": True},
    "bias": {"lora_bias": True},
    "head": {"modules_to_save": ["lm_head"]},
    "ends": {},
}
FACTORS: dict[str, list[Any]] = {
    "family": list(ATTENTION_AND_MLP),
    "kind": list(KINDS),
    "tp": [2, 4],
    "stage": [0, 1, 2, 3],
    "sequence_parallel": [False, True],
}
_ENDS = {
    "llama": ["embed_tokens", "lm_head"],
    "phi3": ["embed_tokens", "lm_head"],
    "falcon_grouped": ["word_embeddings"],
    "mixtral": ["lm_head"],
    "gpt_neox": ["embed_in"],
    "opt": ["embed_tokens"],
}


def possible(row: Row) -> bool:
    family, kind = row.get("family"), row.get("kind")
    if kind == "ends" and family is not None and family not in _ENDS:
        return False
    if kind == "bias" and family == "gemma2":
        return False
    return not (kind == "head" and family in ("qwen2_tied", "gpt2", "gpt_neox", "falcon_grouped", "opt", "gemma2"))


def folder() -> Path:
    return Path(sys.argv[3])


def adapted(family: str, kind: str = "plain", **more: Any) -> Any:
    model = tiny_model(family, dtype=torch.float32)
    torch.manual_seed(3)
    targets = ATTENTION_AND_MLP[family] + (_ENDS[family] if kind == "ends" else [])
    given = {"r": 4, "lora_alpha": 8, "target_modules": targets, "task_type": "CAUSAL_LM", **KINDS[kind], **more}
    config = LoraConfig(**given)
    found = get_peft_model(model, config)
    # B starts as zeros: then A would learn nothing in the first step.
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for name, parameter in found.named_parameters():
            if "lora_B" in name or "lora_embedding_A" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.05)
    return found


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)


def engine_of(model: nn.Module, tp: int, stage: int, **more: Any) -> Any:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 3000},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0.5,
        "tensor_parallel": {"autotp_size": tp, **more},
    }
    return phalanx.initialize(model=model, optimizer=sgd(model), config=config)[0]


def batches(copies: int, vocab_size: int = 103) -> list[list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(2)
    return [list(step) for step in torch.randint(0, vocab_size, (STEPS, copies, 2, 7), generator=generator)]


def check(row: Row) -> None:
    copies = dist.get_world_size() // row["tp"]
    expected = plain_loop(adapted(row["family"], row["kind"]), sgd, language_loss, batches(copies), clip=0.5)
    engine = engine_of(
        adapted(row["family"], row["kind"]), row["tp"], row["stage"], sequence_parallel=row["sequence_parallel"]
    )
    got = engine_loop(engine, language_loss, batches(copies))
    torch.testing.assert_close(got.losses, expected.losses, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(got.norms, expected.norms, rtol=1e-5, atol=1e-6)
    state = engine._consolidated_16bit_state_dict()
    if state is not None:
        for name, whole in expected.parameters.items():
            assert (state[name] - whole).norm() <= 1e-5 * whole.norm() + 1e-7, f"{name} is off after {STEPS} steps"
    engine.destroy()
    if row["stage"] < 3:
        engine.mesh.close()


def trained(family: str, kind: str, stage: int = 1, **more: Any) -> Any:
    engine = engine_of(adapted(family, kind, **more), 2, stage)
    engine_loop(engine, language_loss, batches(engine.mesh.dp.size)[:2])
    engine.eval()
    return engine


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=batches(1)[0][0]).logits
    return found


def saved(family: str, kind: str, stage: int) -> None:
    """Stock PEFT puts the saved adapter on the model that it was trained on, and merges it."""
    engine = trained(family, kind, stage)
    expected = logits(engine)
    path, merged = folder() / f"{family}-{kind}-{stage}", folder() / f"{family}-{kind}-{stage}-merged"
    engine.save_pretrained(path)
    if kind != "bias":
        engine.save_pretrained(merged, merge_adapters=True)
    if dist.get_rank() == 0:
        assert {"adapter_model.safetensors", "adapter_config.json"} <= {each.name for each in path.iterdir()}
        stock = PeftModel.from_pretrained(tiny_model(family, dtype=torch.float32), path).eval()
        torch.testing.assert_close(logits(stock), expected, rtol=1e-5, atol=1e-5)
        if kind != "bias":
            torch.testing.assert_close(logits(stock.merge_and_unload()), expected, rtol=1e-4, atol=1e-5)
            again, told = AutoModelForCausalLM.from_pretrained(merged, output_loading_info=True)
            assert not any(told[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), told
            torch.testing.assert_close(logits(again), expected, rtol=1e-4, atol=1e-5)
    dist.barrier()
    engine.destroy()


def resumed() -> None:
    """A checkpoint without the frozen base goes on as the run did."""
    engine = trained("llama", "plain", 2)
    engine.save_checkpoint(folder() / "resumed", exclude_frozen_parameters=True)
    expected = engine_loop(engine, language_loss, batches(engine.mesh.dp.size)[2:])
    engine.destroy()
    engine = engine_of(adapted("llama"), 2, 1)
    engine.load_checkpoint(folder() / "resumed")
    got = engine_loop(engine, language_loss, batches(engine.mesh.dp.size)[2:])
    assert got.losses == pytest.approx(expected.losses, rel=1e-6)
    if dist.get_rank() == 0:
        index = json.loads((folder() / "resumed" / "global_step2" / "index.json").read_text())
        assert not [name for name in index["entries"] if "base_layer" in name]
    engine.destroy()


def dropped_out() -> None:
    """The ranks agree on what is dropped of what they share, and a whole-model forward stays in step."""
    model = adapted("llama", lora_dropout=0.4)
    engine = engine_of(model, 2, 0)
    got = engine_loop(engine, language_loss, batches(engine.mesh.dp.size))
    assert len(set(got.losses)) == STEPS
    tp = engine.mesh.tp
    for name, parameter in engine.module.named_parameters():
        if engine.registry[name].partition.kind == "replicate" and parameter.requires_grad:
            both = tp.all_gather(parameter.data[None].contiguous())
            assert torch.equal(both[0], both[1]), name
    engine.destroy()


def refused() -> None:
    with pytest.raises(ValueError, match="Dora"):
        engine_of(adapted("llama", use_dora=True), 2, 0)
    with pytest.raises(ValueError, match="ParamWrapper"):
        config = LoraConfig(r=2, target_modules=["q_proj"], target_parameters=["mlp.experts.down_proj"])
        engine_of(get_peft_model(tiny_model("qwen3_moe", dtype=torch.float32), config), 2, 0)
    with pytest.raises(ValueError, match=r"peft.tuners.ia3"):
        config = IA3Config(target_modules=["k_proj"], feedforward_modules=[])
        engine_of(get_peft_model(tiny_model("llama", dtype=torch.float32), config), 2, 0)
    with pytest.raises(ValueError, match="PREFIX_TUNING"):
        config = PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
        engine_of(get_peft_model(tiny_model("llama", dtype=torch.float32), config), 2, 0)
    with pytest.raises(ValueError, match="lora_dropout"):
        engine_of(adapted("llama", lora_dropout=0.1), 2, 0, sequence_parallel=True)
    engine = trained("qwen2_tied", "plain", target_modules=["q_proj", "lm_head"])
    with pytest.raises(ValueError, match="Untie"):
        engine.save_pretrained(folder() / "tied", merge_adapters=True)
    engine.destroy()


def wrapped_after_the_cut() -> None:
    mesh = phalanx.Mesh.build(2)
    model = tiny_model("llama", dtype=torch.float32)
    phalanx.parallelize(model, mesh)
    late = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "down_proj"]))
    with pytest.raises(RuntimeError, match="Add adapters"):
        late(input_ids=batches(1)[0][0])
    mesh.close()


def cases(world: int, full: bool = True) -> dict[str, Callable[[], None]]:
    tps = [tp for tp in FACTORS["tp"] if tp <= world]
    rows = pairwise({**FACTORS, "tp": tps}, possible)
    found: dict[str, Callable[[], None]] = {
        str(row): partial(check, row) for row in (rows if full else rows[:: 2 * world])
    }
    if world == 2:
        saves = [
            ("llama", "ends"),
            ("gpt2", "plain"),
            ("falcon_grouped", "ranks"),
            ("mixtral", "head"),
            ("opt", "bias"),
        ]
        found |= {f"{name} {kind} is saved": partial(saved, name, kind, 1) for name, kind in saves}
        found |= {"refused": refused, "after the cut": wrapped_after_the_cut}
    else:
        found["phi3 is saved at stage 3"] = partial(saved, "phi3", "ends", 3)
    return found | {"goes on": resumed, "dropout": dropped_out}
