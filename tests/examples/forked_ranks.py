"""Ranks that are forked from one process, which has imported everything already.

They run cases (see `tests.training.ranks`) or whole examples.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from tests.training import ranks

PRELOAD = [
    "phalanx.training.deepspeed",
    "phalanx.parallel.verify",
    "tests.training.ranks",
    "transformers.models.gpt_neox.modeling_gpt_neox",
    "transformers.models.llama.modeling_llama",
]


def run_cases(
    modules: Sequence[str],
    world: int,
    folder: Path,
    variables: Mapping[str, str] | None = None,
    timeout: float = 120,
) -> dict[str, list[str]]:
    """What went wrong in each case, over all ranks. `variables`: of their environment; `timeout`: seconds a rank."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    started = [
        context.Process(target=_case_rank, args=(dict(variables or {}), ",".join(modules), world, str(folder), rank))
        for rank in range(world)
    ]
    codes = _wait_for(started, timeout)
    if any(codes):
        raise RuntimeError(f"ranks ended with {codes}")
    read = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(world)]
    return {case: [each[case] for each in read if each[case]] for case in read[0]}


def run_example(name: str, arguments: Sequence[str], world: int, folder: Path, timeout: float = 120) -> str:
    """What the training example prints on rank 0 of `world` processes that a launcher seems to have started."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    with socket.socket() as place:
        place.bind(("127.0.0.1", 0))
        port = place.getsockname()[1]
    output = folder / "output"
    given = (name, list(arguments), world, port, str(output))
    started = [context.Process(target=_example_rank, args=(rank, *given)) for rank in range(world)]
    codes = _wait_for(started, timeout)
    if any(codes):
        raise RuntimeError(f"ranks ended with {codes}")
    return output.read_text()


def _case_rank(variables: dict[str, str], modules: str, world: int, folder: str, rank: int) -> None:
    os.environ.update(variables)
    ranks.main(modules, world, folder, rank)


def _example_rank(rank: int, name: str, arguments: list[str], world: int, port: int, output: str) -> None:
    from tests.examples.training_cases import example

    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in places.items()})
    with open(output if rank == 0 else os.devnull, "w") as file, contextlib.redirect_stdout(file):
        example(name).main(arguments)
    torch.distributed.destroy_process_group()


def _wait_for(started: Sequence[Any], timeout: float) -> list[int | None]:
    for process in started:
        process.start()
    for process in started:
        process.join(timeout)
        if process.is_alive():
            process.kill()
            process.join()
    return [process.exitcode for process in started]
