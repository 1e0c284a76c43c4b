"""Weights go from the ranks that train them to engines in the same processes; answers are those of a model that was
written and read again."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import phalanx
from phalanx import LLM
from phalanx.distributed.group import SoloGroup
from phalanx.distributed.mesh import Mesh
from tests.parallel.models import tiny_model
from tests.training.family_cases import language_loss

PROMPTS = [[5, 6, 7, 8, 9, 10, 11, 12, 13], [3], [20, 30, 40]]
MODELS: dict[str, dict[str, Any]] = {
    "llama_tied": {"vocab_size": 203},
    "qwen3": {"num_key_value_heads": 1},
    "gpt_neox": {},
    "phi3": {},
    "mixtral": {},
    "gpt2": {},
}
ENGINE = {"block_size": 4, "num_blocks": 64, "device": "cpu"}


def trained(name: str, tp: int, stage: int, **more: Any) -> Any:
    model: nn.Module = tiny_model(name, dtype=torch.float32, **MODELS[name])
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage},
        "tensor_parallel": {"autotp_size": tp},
        **more,
    }
    return phalanx.initialize(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=0.05), config=config)[0]


def step(engine: Any) -> None:
    batch = torch.randint(0, 100, (2, 7), generator=torch.Generator().manual_seed(engine.global_steps))
    engine.backward(language_loss(engine, batch))
    engine.step()


def whole_model(engine: Any, folder: Path) -> Path:
    """What the run has trained, as a folder of transformers: merged by the test's own means from the TP ranks."""
    from phalanx.layout import local_shape, merge

    tp, state = engine.mesh.tp, engine.module_state_dict()
    whole = {}
    for name, layout in engine.registry.items():
        flat = state[name].detach().reshape(-1).contiguous()
        counts = tp.all_gather(torch.tensor([flat.numel()])).tolist()
        parts = tp.all_gather(flat, 0, counts).split(counts)
        shapes = [local_shape(layout.partition, layout.shape, rank, tp.size) for rank in range(tp.size)]
        shards = [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
        whole[name] = merge(shards, layout.partition, layout.shape)
    model = type(engine.module)(engine.module.config)
    lacking, unknown = model.load_state_dict(whole, strict=False)
    assert not unknown and all("head" in name or "embed" in name for name in lacking), (lacking, unknown)
    model.tie_weights()
    if dist.get_rank() == 0:
        model.to(state[name].dtype).save_pretrained(folder)
    dist.barrier()
    return folder


def move(name: str, train_tp: int, serve_tp: int, stage: int = 1, **more: Any) -> None:
    engine = trained(name, train_tp, stage, **more)
    folder = Path(sys.argv[3]) / f"{name}-{train_tp}-{serve_tp}-{stage}-{len(more)}"
    first = whole_model(engine, folder / "first")
    group: Any = Mesh.build(serve_tp).tp if serve_tp > 1 else SoloGroup()
    llm = LLM(str(first), group=group, tensor_parallel_size=serve_tp, **ENGINE)
    before = [each.outputs[0].token_ids for each in llm.generate(PROMPTS, max_tokens=8, ignore_eos=True)]
    for round_number in range(2):
        step(engine)
        step(engine)
        llm.update_weights(engine.shards(), engine.mesh.tp)
        got = [each.outputs[0].token_ids for each in llm.generate(PROMPTS, max_tokens=8, ignore_eos=True)]
        again = whole_model(engine, folder / f"after{round_number}")
        with LLM(str(again), group=SoloGroup(), **ENGINE) as read:
            expected = [each.outputs[0].token_ids for each in read.generate(PROMPTS, max_tokens=8, ignore_eos=True)]
        assert got == expected and got != before
        before = got
    llm.close()
    engine.destroy()


def differing_updates() -> None:
    """A later update that differs on one rank, or comes over another group, is an error on all, at once."""
    engine = trained("llama_tied", 2, 0)
    folder = whole_model(engine, Path(sys.argv[3]) / "differing")
    llm = LLM(str(folder), group=engine.mesh.tp, tensor_parallel_size=2, **ENGINE)
    shards = dict(engine.shards().items())
    llm.update_weights(shards, engine.mesh.tp)
    fewer = dict(list(shards.items())[: -1 - dist.get_rank()] if dist.get_rank() else shards)
    began = time.monotonic()
    with pytest.raises(ValueError, match="the 2 ranks of the first update"):
        llm.update_weights(fewer, engine.mesh.tp)
    with pytest.raises(ValueError, match="over 1 ranks here"):
        llm.update_weights(shards, SoloGroup())
    assert time.monotonic() - began < 10
    llm.update_weights(shards, engine.mesh.tp)
    llm.close()
    engine.destroy()


def one_wrong_rank(train_tp: int, first: bool) -> None:
    """What is wrong on one rank is the same error on both, at once, and the old weights answer as before; in the first
    update and in a later one, where the ranks give together and where they serve together."""
    engine = trained("llama_tied", train_tp, 0)
    folder = whole_model(engine, Path(sys.argv[3]) / f"wrong-{train_tp}-{first}")
    group: Any = Mesh.build(2).tp if train_tp == 1 else SoloGroup()
    llm = LLM(str(folder), group=group, tensor_parallel_size=group.size, **ENGINE)
    shards = dict(engine.shards().items())
    if not first:
        llm.update_weights(shards, engine.mesh.tp)
    before = [each.outputs[0].token_ids for each in llm.generate(PROMPTS, max_tokens=8, ignore_eos=True)]
    step(engine)
    name, other = "model.layers.1.mlp.up_proj.weight", "model.norm.weight"
    partition, up = shards[name]
    faults: list[tuple[str, dict[str, Any]]] = [
        (name, {name: (partition, up[:-1])}),
        ("unpack", {other: None}),
        ("first update" if not first else "model.more", {"model.more": shards[other]}),
    ]
    if train_tp == 2:
        faults.append(("float16", {name: (partition, up.half())}))
    began = time.monotonic()
    for said, wrong in faults:
        given = {**engine.shards(), **(wrong if dist.get_rank() else {})}
        with pytest.raises((ValueError, TypeError)) as caught:
            llm.update_weights(given, engine.mesh.tp)
        told: list[Any] = [None, None]
        dist.all_gather_object(told, str(caught.value))
        assert said in told[0] and told[1] in told[0], told
    assert time.monotonic() - began < 10
    got = [each.outputs[0].token_ids for each in llm.generate(PROMPTS, max_tokens=8, ignore_eos=True)]
    assert got == before
    if train_tp == 2:
        if dist.get_rank() == 1:
            llm.add_request([5, 6], {"max_tokens": 2})
        with pytest.raises((RuntimeError, ValueError), match="run or wait"):
            llm.update_weights(engine.shards(), engine.mesh.tp)
    llm.close()
    engine.destroy()


def cases(world: int) -> dict[str, Callable[[], None]]:
    found: dict[str, Callable[[], None]] = {}
    for name in MODELS:
        for train_tp, serve_tp in [(2, 2), (2, 1), (1, 2)]:
            found[f"{name} from TP {train_tp} to TP {serve_tp}"] = partial(move, name, train_tp, serve_tp)
    found["updates that differ"] = differing_updates
    for train_tp in (1, 2):
        for first in (True, False):
            found[f"one wrong rank, TP {train_tp}, first {first}"] = partial(one_wrong_rank, train_tp, first)
    found["llama at ZeRO 3"] = partial(move, "llama_tied", 1, 2, 3)
    found["llama in bf16"] = partial(move, "llama_tied", 2, 1, 2, bf16={"enabled": True})
    return found
