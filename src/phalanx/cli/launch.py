"""``phalanx launch``: a training script on every device of this machine."""

from __future__ import annotations

import logging
import os
import signal
import socket
from typing import Annotated

import typer

from phalanx.cli.failures import FAILED


def launch(
    script: Annotated[str, typer.Argument(help="A Python file, or with --module the name of a module.")],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[ARGUMENTS]...", help="What the script is given.")
    ] = None,
    nproc: Annotated[
        int | None, typer.Option("--nproc", "--num_gpus", "-n", min=1, help="Ranks, one process each. \\[all GPUs]")
    ] = None,
    master_port: Annotated[
        int | None,
        typer.Option("--master_port", "--master-port", min=1, max=65535, help="Where ranks meet. \\[a free port]"),
    ] = None,
    no_local_rank: Annotated[
        bool,
        typer.Option("--no-local-rank", "--no_local_rank", help="Do not give the script --local_rank=N."),
    ] = False,
    module: Annotated[bool, typer.Option("--module", "-m", help="SCRIPT is a module, as for python -m.")] = False,
) -> None:
    """Start a training script once a rank, as torchrun does, on this machine.

    Each rank finds its place in RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, and is given --local_rank=N
    as its first argument, as DeepSpeed's launcher does. When one rank fails the others are ended; the exit code is that
    of the first that failed (128 + the signal that killed it). For several machines use torchrun itself.
    """
    count = _gpus() if nproc is None else nproc
    if not module and not os.path.isfile(script):
        raise typer.BadParameter(f"there is no file {script!r}")
    command = [*ranks_command(count, master_port), *["--module"] * module, script]
    # torchrun fills in $-names in what the script is given; ours is the only one.
    given = [argument.replace("$", "$$") for argument in arguments or []]
    raise typer.Exit(run_ranks(command, given if no_local_rank else ["--local_rank=${local_rank}", *given]))


def ranks_command(count: int, port: int | None = None) -> list[str]:
    """What torchrun is told to start ``count`` ranks on this machine, without what they run."""
    # An even share of the processors for each rank; torchrun would give each one.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // count)))
    port = _free_port() if port is None else port
    return ["--nnodes=1", f"--nproc-per-node={count}", "--master-addr=127.0.0.1", f"--master-port={port}"]


def run_ranks(command: list[str], given: list[str]) -> int:
    """torchrun in this process; the exit code of the rank that failed first."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    settings = parse_args(command)
    # Not through its parser, which takes an option of the script for one of its own.
    settings.training_script_args = given
    # What torch logs of ranks that end is said below in one line, beside what they have said themselves.
    elastic = logging.getLogger("torch.distributed.elastic")
    elastic.addHandler(logging.NullHandler())
    elastic.propagate = False
    try:
        run(settings)
    except ChildFailedError as error:
        rank, first = error.get_first_failure()
        how = (
            f"was killed by {signal.Signals(-first.exitcode).name}"
            if first.exitcode < 0
            else f"ended with exit code {first.exitcode}"
        )
        typer.echo(f"rank {rank} {how}", err=True)
        return 128 - first.exitcode if first.exitcode < 0 else first.exitcode or FAILED
    except SignalException as error:
        return 128 + error.sigval
    return 0


def _gpus() -> int:
    """How many GPUs this machine has."""
    import torch

    if not torch.cuda.is_available():
        raise typer.BadParameter("no GPU is to be seen here: say how many ranks to start, --nproc N")
    return torch.cuda.device_count()


def _free_port() -> int:
    with socket.socket() as place:
        place.bind(("127.0.0.1", 0))
        return int(place.getsockname()[1])
