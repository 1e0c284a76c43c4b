"""DeepSpeed's whole-tensor checkpoints, as its own code lays them out, into cut and sharded engines."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from phalanx.training.checkpoint_folder import CheckpointError
from tests.training.family_cases import language_loss
from tests.training.loops import adamw_in_groups, engine_loop, plain_loop
from tests.training.reshard_cases import batches, build, engine_of


def write(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for name, parameter in model.named_parameters():
        path = folder / "universal" / "zero" / name
        path.mkdir(parents=True)
        state = optimizer.state[parameter]
        torch.save({"param": parameter.detach()}, path / "fp32.pt")
        for key in ("exp_avg", "exp_avg_sq"):
            torch.save({"param": state[key]}, path / f"{key}.pt")
        torch.save(int(state["step"]), path / "step.pt")
    (folder / "whole").mkdir()
    torch.save({"module": model.state_dict(), "global_steps": 3}, folder / "whole" / "mp_rank_00_model_states.pt")
    (folder / "pieces").mkdir()
    for rank in range(2):
        torch.save({"module": {}}, folder / "pieces" / f"mp_rank_0{rank}_model_states.pt")


def case_universal_and_consolidated() -> None:
    folder = Path(sys.argv[3]) / "deepspeed"
    steps = batches(1003)
    model = build("llama", 0)
    optimizer = adamw_in_groups(model)
    plain_loop(model, lambda _: optimizer, language_loss, steps[:3], clip=0.5)
    if dist.get_rank() == 0:
        write(folder, model, optimizer)
    dist.barrier()
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    expected = plain_loop(model, lambda _: optimizer, language_loss, steps[3:5], clip=0.5)
    for tp, stage in ((2, 0), (1, 2), (1, 3)):
        engine: Any = engine_of(build("llama", 1), tp, 2 // tp, stage)
        engine.load_checkpoint(folder, "universal")
        for group in engine.optimizer.param_groups:  # the plain run has no schedule
            group["lr"] = 0.02 if group["weight_decay"] == 0 else 0.01
        engine.lr_scheduler = None
        got = engine_loop(engine, language_loss, steps[3:5])
        torch.testing.assert_close(got.losses, expected.losses, rtol=1e-5, atol=1e-5)
        engine.load_checkpoint(folder, "whole", load_optimizer_states=False)
        state = engine._consolidated_16bit_state_dict()
        if state is not None:
            assert all(torch.equal(state[name], value) for name, value in before.items())
        with pytest.raises(CheckpointError, match="optimizer state cannot be read"):
            engine.load_checkpoint(folder, "whole")
        with pytest.raises(CheckpointError, match=r"in pieces \(mp_rank_00.*mp_rank_01"):
            engine.load_checkpoint(folder, "pieces")
        engine.destroy()
