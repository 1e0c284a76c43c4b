"""A run is saved on four ranks and goes on there; resumed on any other grid, it goes on in the same way."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import phalanx
from tests.parallel.models import tiny_model
from tests.training.family_cases import language_loss
from tests.training.loops import Run, adamw_in_groups, engine_loop

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama_tied", {"vocab_size": 1003}),
    "phi3": ("phi3", {"num_key_value_heads": 1}),
    "gpt_neox": ("gpt_neox", {}),
    "mixtral": ("mixtral", {}),
}
GRIDS = {1: [(1, 1, 0)], 2: [(2, 1, 1), (1, 2, 1)], 4: [(4, 1, 0), (2, 2, 3), (2, 2, 2)]}
BEFORE, AFTER, MICRO_BATCHES = 3, 5, 4


def shared() -> Path:
    """Where all starts of ranks of one test find the checkpoints."""
    return Path(sys.argv[3]).parent


def build(name: str, seed: int) -> nn.Module:
    family, changes = MODELS[name]
    torch.manual_seed(seed)
    model = tiny_model(family, dtype=torch.float32, **changes)
    if seed:
        # Other values than were saved: what is not read shows.
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1)
    return model


def engine_of(model: nn.Module, tp: int, dp: int, stage: int, **more: Any) -> Any:
    optimizer = adamw_in_groups(model)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": MICRO_BATCHES // dp,
        "gradient_clipping": 0.5,
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 3000},
        "tensor_parallel": {"autotp_size": tp},
        **more,
    }
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
    return phalanx.initialize(model=model, optimizer=optimizer, lr_scheduler=schedule, config=config)[0]


def batches(vocab_size: int) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(0, vocab_size, (BEFORE + AFTER, MICRO_BATCHES, 2, 7), generator=generator)
    return [list(step) for step in tokens]


def save(name: str) -> None:
    engine = engine_of(build(name, 0), 2, 2, 2)
    steps = batches(engine.module.config.vocab_size)
    engine_loop(engine, language_loss, steps[:BEFORE])
    engine.save_checkpoint(shared() / name, client_state={"epoch": 7})
    after = engine_loop(engine, language_loss, steps[BEFORE:])
    if dist.get_rank() == 0:
        (shared() / f"{name}.json").write_text(json.dumps([after.losses, after.norms, engine.get_lr()]))
    engine.destroy()


def resume(name: str, tp: int, dp: int, stage: int) -> None:
    engine = engine_of(build(name, 1), tp, dp, stage)
    path, state = engine.load_checkpoint(shared() / name)
    assert path == str(shared() / name / "global_step3") and state == {"epoch": 7}
    assert (engine.global_steps, engine.micro_steps) == (BEFORE, BEFORE * MICRO_BATCHES // dp)
    after = engine_loop(engine, language_loss, batches(engine.module.config.vocab_size)[BEFORE:])
    losses, norms, rates = json.loads((shared() / f"{name}.json").read_text())
    torch.testing.assert_close(after.losses, losses, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(after.norms, norms, rtol=1e-5, atol=1e-5)
    assert engine.get_lr() == rates
    engine.destroy()


def resume_with_dropout(**more: Any) -> None:
    """On the same grid, what was drawn is drawn again: to the last bit."""

    def run(seed: int) -> Any:
        torch.manual_seed(11)
        model = tiny_model("gpt2", dtype=torch.float32, resid_pdrop=0.2, attn_pdrop=0.1, embd_pdrop=0.1)
        engine = engine_of(model, 2, 2, 1, **more)
        torch.manual_seed(seed)
        return engine

    engine = run(1)
    steps = batches(engine.module.config.vocab_size)
    engine_loop(engine, language_loss, steps[:BEFORE])
    folder = shared() / f"dropout-{len(more)}"
    engine.save_checkpoint(folder, "here", asynchronous=True)
    expected: Run = engine_loop(engine, language_loss, steps[BEFORE:])
    engine.wait_for_checkpoint()
    dist.barrier()
    engine = run(2)
    engine.load_checkpoint(folder)
    got: Run = engine_loop(engine, language_loss, steps[BEFORE:])
    assert (got.losses, got.norms) == (expected.losses, expected.norms)
    for one, other in zip(got.parameters.values(), expected.parameters.values(), strict=True):
        assert torch.equal(one, other)


def cases(world: int) -> dict[str, Callable[[], None]]:
    found: dict[str, Callable[[], None]] = {}
    if world == 4:
        found |= {f"{name} is saved": partial(save, name) for name in MODELS}
        found["dropout goes on"] = resume_with_dropout
        found["dropout goes on in bf16"] = partial(resume_with_dropout, bf16={"enabled": True})
    for name in MODELS:
        for grid in GRIDS[world]:
            found[f"{name} goes on with tp, dp, stage {grid}"] = partial(resume, name, *grid)
    return found
