"""``phalanx ckpt``: what is in a training checkpoint, as a model folder, or in fewer files."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from phalanx.cli.option_groups import grouped
from phalanx.cli.options import OutputOptions

ckpt = typer.Typer(
    name="ckpt",
    no_args_is_help=True,
    help="Look into training checkpoints, export them as models, merge the ranks' files.",
)

_PATH = typer.Argument(metavar="PATH", help="A checkpoint, or the folder of several: then the newest.")
_TAG = typer.Option("--tag", metavar="TAG", help="Which one of several. \\[the newest]")
_KINDS = {
    "master": "trained weights",
    "model": "frozen weights",
    "buffer": "buffers",
    "optimizer": "optimizer",
    "random": "random states",
}


@ckpt.command()
@grouped
def info(
    path: Annotated[Path, _PATH],
    tag: Annotated[str | None, _TAG] = None,
    *,
    output: OutputOptions,
) -> None:
    """Say what a checkpoint is: its model, step, ranks, ZeRO stage, tensors and bytes. Reads no tensor."""
    from phalanx.training.checkpoint_folder import Saved
    from phalanx.training.checkpoint_tools import describe, find

    with Saved(find(path, tag)) as saved:
        found = describe(saved)
    if output.json:
        typer.echo(json.dumps(found, indent=2))
    else:
        _print(found)


@ckpt.command()
@grouped
def export(
    path: Annotated[Path, _PATH],
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Where the model goes.")],
    dtype: Annotated[
        str | None, typer.Option("--dtype", help="float32, bfloat16 or float16. \\[as saved: the master weights']")
    ] = None,
    tag: Annotated[str | None, _TAG] = None,
    *,
    output: OutputOptions,
) -> None:
    """Write a checkpoint's model as a Hugging Face folder, a tensor at a time. It needs no ranks."""
    from phalanx.cli.running import notes, set_logging

    set_logging(output)
    with notes().status("starting"):
        from phalanx.config import parse_dtype
        from phalanx.training import checkpoint_tools as tools
        from phalanx.training.checkpoint_folder import Saved

        kind = None if dtype is None else parse_dtype(dtype)
    with Saved(tools.find(path, tag)) as saved, _bar("exporting") as tell:
        tools.export(saved, folder, kind, tell)
        _done({"checkpoint": str(saved.path), "model": str(folder)}, output)


@ckpt.command()
@grouped
def merge(
    path: Annotated[Path, _PATH],
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="The folder of checkpoints that it goes into.")],
    tag: Annotated[str | None, _TAG] = None,
    *,
    output: OutputOptions,
) -> None:
    """Write a checkpoint with whole tensors in few files, a tensor at a time. Any number of ranks loads it still."""
    from phalanx.training import checkpoint_tools as tools
    from phalanx.training.checkpoint_folder import Saved

    with Saved(tools.find(path, tag)) as saved, _bar("merging") as tell:
        target = tools.merge(saved, folder, tell)
        _done({"checkpoint": str(saved.path), "merged": str(target)}, output)


@contextmanager
def _bar(what: str) -> Iterator[Callable[[int, int], None]]:
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    from phalanx.cli.running import notes

    console = notes()
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as progress:
        task = progress.add_task(what, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


def _done(result: dict[str, str], output: OutputOptions) -> None:
    typer.echo(json.dumps(result, indent=2) if output.json else list(result.values())[-1])


def _print(found: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, soft_wrap=True)
    table = Table.grid(padding=(0, 2))
    grid = f"tensor parallel {found['tp']} x data parallel {found['dp']}, ZeRO stage {found['stage']}"
    for name, value in (
        ("path", found["path"]),
        ("model", f"{found['architecture'] or 'not of transformers'}, {found['parameters']:,} parameters saved"),
        ("step", f"{found['global_steps']:,}, of which {found['skipped_steps']:,} were skipped"),
        ("written by", f"{grid}; any other loads it"),
        ("optimizer", found["optimizer"] or "none"),
        ("frozen weights", "left out" if found["frozen_excluded"] else "with it, where there are any"),
        ("files", f"{found['files']} safetensors files, {_size(found['bytes'])}"),
        ("client state", ", ".join(found["client_state"]) or "none"),
    ):
        table.add_row(f"[dim]{name}[/dim]", value)
    console.print(table)
    kinds = Table(box=None, header_style="dim")
    for column in ("", "tensors", "elements", "bytes"):
        kinds.add_column(column, justify="left" if not column else "right")
    for kind, numbers in found["kinds"].items():
        kinds.add_row(
            _KINDS.get(kind, kind), f"{numbers['tensors']:,}", f"{numbers['elements']:,}", _size(numbers["bytes"])
        )
    console.print(kinds)


def _size(number: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if number < 1000:
            return f"{number:.3g} {unit}"
        number /= 1024
    return f"{number:.2f} GiB"
