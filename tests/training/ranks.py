"""Runs the cases of a module on gloo ranks, all cases in one start: `python -m tests.training.ranks MODULE ...`.

A case is a function of no arguments called `case_...`; every rank runs every case, in the order of the module. A case
that fails on one rank would leave the others waiting, so they time out and fail as well; later cases then run on groups
of their own.
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist


def cases(module: str, world: int) -> list[str]:
    """The names of a module's cases for `world` ranks: `case_...` for all, `case2_...` for 2."""
    found = vars(importlib.import_module(module))
    return [name for name in found if name.startswith(("case_", f"case{world}_"))]


def run_cases(module: str, world: int, folder: Path) -> dict[str, list[str]]:
    """What went wrong in each case, over all ranks."""
    command = [sys.executable, "-m", "tests.training.ranks", module, str(world), str(folder)]
    started = [subprocess.Popen([*command, str(rank)]) for rank in range(world)]
    codes = [process.wait(timeout=240) for process in started]
    results = [folder / f"rank{rank}.json" for rank in range(world)]
    if any(codes) or not all(result.exists() for result in results):
        raise RuntimeError(f"ranks ended with {codes}")
    read = [json.loads(result.read_text()) for result in results]
    return {case: [each[case] for each in read if each[case]] for case in read[0]}


def main(module: str, world: int, folder: str, rank: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/meet",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=20),
    )
    found = importlib.import_module(module)
    results = {}
    for name in cases(module, world):
        try:
            getattr(found, name)()
            results[name] = ""
        except Exception:
            results[name] = f"rank {rank}: {traceback.format_exc()}"
    Path(folder, f"rank{rank}.json").write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
