"""Runs the cases of modules on gloo ranks, all of them in one start a world size.

A case is a function of no arguments called `case_...` for two ranks, `grid_...` for four, or one of those that a
module's `cases(world)` names; every rank runs every one, in the order of the modules. One that fails on one rank may
leave the others waiting: they time out and fail as well. Cases make their own groups, so those that follow are not
touched.
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def run_cases(modules: Sequence[str], world: int, folder: Path, timeout: float = 240) -> dict[str, list[str]]:
    """What went wrong in each case, over all ranks. `timeout`: seconds for all of them."""
    command = [sys.executable, "-m", "tests.training.ranks", ",".join(modules), str(world), str(folder)]
    started = [subprocess.Popen([*command, str(rank)]) for rank in range(world)]
    codes = [process.wait(timeout=timeout) for process in started]
    if any(codes):
        raise RuntimeError(f"ranks ended with {codes}")
    read = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(world)]
    return {case: [each[case] for each in read if each[case]] for case in read[0]}


def cases_of(module: Any, world: int) -> dict[str, Callable[[], None]]:
    if hasattr(module, "cases"):
        named: dict[str, Callable[[], None]] = module.cases(world)
        return named
    prefix = "grid_" if world == 4 else "case_"
    return {name: case for name, case in vars(module).items() if name.startswith(prefix)}


def main(modules: str, world: int, folder: str, rank: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/meet",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=20),
    )
    results = {}
    for module in modules.split(","):
        for name, case in cases_of(importlib.import_module(module), world).items():
            try:
                case()
                results[name] = ""
            except BaseException:  # what pytest.raises raises is no Exception
                results[name] = f"rank {rank}: {traceback.format_exc()}"
    Path(folder, f"rank{rank}.json").write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
