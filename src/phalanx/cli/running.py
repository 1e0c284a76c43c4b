"""What the commands that run a model share: notes on standard error, and an LLM from the options."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from phalanx.cli.options import EngineOptions, OutputOptions

if TYPE_CHECKING:
    from rich.console import Console
    from rich.status import Status

    from phalanx.engine import LLM


def notes() -> Console:
    """Where everything goes that is not the result."""
    from rich.console import Console

    return Console(stderr=True, highlight=False, soft_wrap=True)


def set_logging(output: OutputOptions) -> None:
    """Warnings on standard error; with --verbose, what the engine says of itself too."""
    logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s", force=True)
    if output.verbose or output.debug:
        logging.getLogger("phalanx").setLevel(logging.DEBUG if output.debug else logging.INFO)


def load(model: str, engine: EngineOptions, output: OutputOptions, **overrides: Any) -> LLM:
    """The LLM of a command; ``overrides`` are settings that the command has its own mind about."""
    set_logging(output)
    settings = {**overrides, **engine.settings()}
    console = notes()
    with console.status(f"loading {model}") as status:
        path = fetched(model, sayer(console, status))
        from phalanx.engine import LLM

        return LLM(path, settings)


def has_template(llm: LLM) -> bool:
    """Whether the model was made for conversations."""
    return bool(getattr(llm.tokenizer, "chat_template", None))


def sayer(console: Console, status: Status) -> Callable[[str], None]:
    """What is told of a download: beside the spinner, and in lines where there is no terminal to show one."""

    def say(line: str) -> None:
        status.update(line)
        if not console.is_terminal:
            console.print(line, markup=False)

    return say


def check_name(model: str) -> None:
    """Raises BadParameter where nothing can be called so; before anything heavy is imported."""
    from phalanx.weights.names import wrong_name

    wrong = wrong_name(model)
    if wrong is not None:
        raise typer.BadParameter(wrong)


def fetched(model: str, say: Callable[[str], None]) -> str:
    """A model's name, downloaded first if it is not here yet.

    Raises:
        BadParameter: nothing can be called so.
        WeightError: it cannot be had.
    """
    from phalanx.weights.names import EMBEDDED

    check_name(model)
    if model == EMBEDDED:
        from phalanx.weights import pull_smollm2

        pull_smollm2(progress=say)
    elif not Path(model).expanduser().exists():
        from phalanx.weights.hub import snapshot

        snapshot(model, progress=say)
    return model
