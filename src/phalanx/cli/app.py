"""The ``phalanx`` command and its subcommands."""

from __future__ import annotations

from typing import Annotated

import typer

import phalanx
from phalanx.cli.bench import bench
from phalanx.cli.chat import chat
from phalanx.cli.check import check
from phalanx.cli.ckpt import ckpt
from phalanx.cli.failures import Commands
from phalanx.cli.generate import generate
from phalanx.cli.info import info
from phalanx.cli.launch import launch
from phalanx.cli.plan import plan
from phalanx.cli.plot import plot
from phalanx.cli.pull import pull
from phalanx.cli.serve import serve
from phalanx.cli.train import train

app = typer.Typer(
    name="phalanx",
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"phalanx {phalanx.__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Declare a Transformer once, then serve it and train it on any number of devices.

    MODEL is a folder (Hugging Face or serialised), a GGUF file, a hub id (owner/name), or "smollm2", a small real model
    that comes from the Python package index.
    """


app.command()(pull)
app.command()(generate)
app.command()(chat)
app.command()(serve)
app.command()(info)
app.command()(plan)
app.command()(check)
# What follows the script belongs to the script.
app.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})(launch)
app.command()(train)
app.command()(plot)
app.add_typer(bench, name="bench")
app.add_typer(ckpt, name="ckpt")


def main() -> None:
    """Runs the command line: exit code 0, 1 for a failure, 2 for bad input, 130 for Ctrl-C."""
    app()
