"""Checkpoints for the command line, and what must be in them; and a run that goes on from a merged one."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.training.export_cases import logits_of, trained
from tests.training.family_cases import language_loss
from tests.training.loops import engine_loop
from tests.training.reshard_cases import batches, build, engine_of

GRIDS: dict[str, tuple[int, int]] = {"llama": (2, 1), "mixtral": (1, 2)}


def shared() -> Path:
    return Path(sys.argv[3]).parent


def save(name: str) -> None:
    tp, stage = GRIDS[name]
    engine: Any = trained(build(name, 0), tp, stage, bf16={"enabled": name == "mixtral"})
    engine.save_checkpoint(shared() / name, client_state={"epoch": 7})
    expected = logits_of(engine)
    state = engine._consolidated_16bit_state_dict()
    if dist.get_rank() == 0:
        torch.save({"logits": expected, "state": state}, shared() / f"{name}.pt")
    engine.destroy()


def save_with_moments() -> None:
    engine: Any = engine_of(build("llama", 0), 2, dist.get_world_size() // 2, 1)
    steps = batches(1003)
    engine_loop(engine, language_loss, steps[:2])
    engine.save_checkpoint(shared() / "moments")
    torch.save(engine_loop(engine, language_loss, steps[2:4]).losses, shared() / "moments.pt")
    engine.destroy()


def cases(world: int) -> dict[str, Callable[[], None]]:
    return {name: partial(save, name) for name in GRIDS} | {"moments": save_with_moments}
