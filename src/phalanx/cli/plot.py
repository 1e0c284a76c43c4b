"""``phalanx plot``: the curves of a training run as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def plot(
    logs: Annotated[
        list[Path], typer.Argument(metavar="LOG.jsonl...", help="The log.jsonl of one run, or of several.")
    ],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE.svg", help="Where the picture goes.")] = Path(
        "run.svg"
    ),
) -> None:
    """Draw loss, learning rate, gradient norm and tokens per second of training runs over their steps."""
    from phalanx.training.run_picture import read_log, svg

    if output.suffix != ".svg":
        raise typer.BadParameter(f"--output {output}: pictures are SVG, so its name ends with .svg")
    try:
        runs = {str(path): read_log(path) for path in logs}
    except (OSError, ValueError) as error:
        raise typer.BadParameter(str(error)) from None
    aside = output.with_name(f".{output.name}.new")
    aside.write_text(svg(runs))
    aside.replace(output)
    typer.echo(f"{output}", err=True)
