"""`tests.training.ranks` with ranks that are forked from one process, which has imported everything already."""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Sequence
from pathlib import Path

from tests.training import ranks

PRELOAD = [
    "phalanx.training.deepspeed",
    "phalanx.parallel.verify",
    "tests.training.ranks",
    "transformers.models.gpt_neox.modeling_gpt_neox",
    "transformers.models.llama.modeling_llama",
]


def run_cases(modules: Sequence[str], world: int, folder: Path, timeout: float = 120) -> dict[str, list[str]]:
    """What went wrong in each case, over all ranks. `timeout`: seconds for each rank."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    started = [
        context.Process(target=ranks.main, args=(",".join(modules), world, str(folder), rank)) for rank in range(world)
    ]
    for process in started:
        process.start()
    for process in started:
        process.join(timeout)
        if process.is_alive():
            process.kill()
    codes = [process.exitcode for process in started]
    if any(codes):
        raise RuntimeError(f"ranks ended with {codes}")
    read = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(world)]
    return {case: [each[case] for each in read if each[case]] for case in read[0]}
