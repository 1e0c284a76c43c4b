"""A run that saves all the time, until it is killed: `python -m tests.training.crash_run RANK FOLDER MEET NUMBER`."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist

from tests.training.family_cases import language_loss
from tests.training.reshard_cases import batches, build, engine_of


def main(rank: int, folder: Path, meet: str, number: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meet}", rank=rank, world_size=2)
    tp = 2 - number % 2
    engine = engine_of(build("llama", 0), tp, 2 // tp, 1)
    path, state = engine.load_checkpoint(folder)
    if (path is None) != (number == 0) or (state is not None and state["steps"] != engine.global_steps):
        raise RuntimeError(f"loaded {path} with {state} at step {engine.global_steps}")
    (folder / f"run{number}-rank{rank}").write_text(str(engine.global_steps))
    steps = batches(1003)
    while True:
        for micro_batch in steps[engine.global_steps % len(steps)][: engine.gradient_accumulation_steps()]:
            engine.backward(language_loss(engine, micro_batch))
            engine.step()
        # Under a name of its own, or in the place of the one before.
        tag = "same" if number % 3 == 2 else None
        engine.save_checkpoint(folder, tag, {"steps": engine.global_steps}, asynchronous=number % 4 > 1)


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
