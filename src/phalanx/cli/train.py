"""``phalanx train``: fine-tunes a model by a recipe, on every device of this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from phalanx.cli.launch import ranks_command, run_ranks

RUN = "phalanx.training.run"


def train(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE", help="What to train, on what, how: TOML or JSON.")],
    nproc: Annotated[
        int | None, typer.Option("--nproc", "-n", min=1, help="Ranks, one process each. \\[all GPUs; 1 without]")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the newest checkpoint of the output folder, if it has one.")
    ] = False,
) -> None:
    """Fine-tune a model by a recipe: checkpoints, a log and the trained model go into its output folder.

    ``docs/training.md`` explains the recipe. On several machines start ``python -m phalanx.training.run RECIPE`` with
    torchrun.
    """
    from phalanx.config import ConfigError
    from phalanx.training.checkpoint_folder import check_new_run
    from phalanx.training.recipe import read_recipe

    try:
        read = read_recipe(recipe)
        if not resume:
            check_new_run(Path(read.output.folder) / "checkpoints")
    except ConfigError as error:
        raise typer.BadParameter(str(error)) from None
    count = _devices() if nproc is None else nproc
    if count % read.parallel.tensor_parallel_size:
        raise typer.BadParameter(
            f"{count} ranks cannot be cut into groups of parallel.tensor_parallel_size="
            f"{read.parallel.tensor_parallel_size}: start a multiple of it, --nproc N"
        )
    given = [str(recipe), "--base", str(_base(read.model.path, Path(read.output.folder)))]
    given += ["--resume"] * resume
    if count == 1:
        from phalanx.training.run import main

        raise typer.Exit(main(given))
    raise typer.Exit(run_ranks([*ranks_command(count), "--module", RUN], [each.replace("$", "$$") for each in given]))


def _devices() -> int:
    import torch

    return max(1, torch.cuda.device_count()) if torch.cuda.is_available() else 1


def _base(model: str, output: Path) -> Path:
    """A Hugging Face folder of the model: its own, or for one of another format a copy in the output folder, beside
    which is written what it is a copy of."""
    import torch

    from phalanx.bench.hf_copy import hf_folder
    from phalanx.cli.running import fetched, notes, sayer

    copy = output / "base"
    note = copy / "copy_of.txt"
    if note.is_file():
        if note.read_text(encoding="utf-8") != model:
            raise typer.BadParameter(
                f"model.path={model!r}, but the run in {output} began with {note.read_text(encoding='utf-8')!r}: "
                "choose another output.folder"
            )
        return copy
    console = notes()
    with console.status(f"reading {model}") as status:
        fetched(model, sayer(console, status))
    folder = hf_folder(model, torch.float32, False, copy)
    if folder == copy.absolute():
        note.write_text(model, encoding="utf-8")
    return folder
