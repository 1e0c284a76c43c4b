"""A run goes on from a checkpoint that the command line has merged."""

from __future__ import annotations

import torch

from tests.training.ckpt_cases import shared
from tests.training.family_cases import language_loss
from tests.training.loops import engine_loop
from tests.training.reshard_cases import batches, build, engine_of


def case_goes_on() -> None:
    engine = engine_of(build("llama", 1), 2, 1, 1)
    assert engine.load_checkpoint(shared() / "merged")[0] == str(shared() / "merged" / "global_step2")
    losses = engine_loop(engine, language_loss, batches(1003)[2:4]).losses
    torch.testing.assert_close(losses, torch.load(shared() / "moments.pt"), rtol=1e-6, atol=1e-6)
    engine.destroy()
