"""How a command ends that cannot do what was asked: one readable error, as text or as JSON, and an exit code."""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Any

import typer
from typer.core import TyperGroup

FAILED, BAD_INPUT = 1, 2

# click's own class of usage errors, whichever click this typer has (its copy, or the package).
UsageError: type[Exception] = typer.BadParameter.__mro__[1]


class Failure(RuntimeError):
    """Something went wrong that is not the fault of what was given."""


class Commands(TyperGroup):
    """The top level: every error of every command ends here.

    ``--json`` puts errors on standard output as ``{"error": {"type": ..., "message": ...}}``; ``--debug`` adds the
    traceback on standard error.
    """

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        if not standalone_mode:
            return super().main(args, prog_name, complete_var, False, windows_expand_args, **extra)
        flags = list(sys.argv[1:] if args is None else args)
        flags = flags[: flags.index("--")] if "--" in flags else flags
        try:
            code = super().main(args, prog_name, complete_var, False, windows_expand_args, **extra)
        except BrokenPipeError:
            # The reader of our output has gone (`| head`): nothing is left to say, and nowhere to say it.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            code = FAILED
        except Exception as error:
            if "--debug" in flags:
                traceback.print_exc()
            code = report(error, as_json="--json" in flags)
        sys.exit(code if isinstance(code, int) else 0)


def report(error: Exception, as_json: bool) -> int:
    """Prints an error; returns the exit code that it means."""
    message = message_of(error)
    if isinstance(error, UsageError) and not message:
        # Nothing was given, and the help has been shown.
        return exit_code(error)
    if as_json:
        typer.echo(json.dumps({"error": {"type": type(error).__name__, "message": message}}))
    else:
        context = getattr(error, "ctx", None)
        if isinstance(error, UsageError) and context is not None:
            typer.echo(f"{context.get_usage()}\nHelp: {context.command_path} --help", err=True)
        typer.secho("Error: ", fg="red", err=True, nl=False)
        typer.echo(message, err=True)
    return exit_code(error)


def message_of(error: Exception) -> str:
    """What to tell the user."""
    if isinstance(error, UsageError):
        return str(error.format_message())  # type: ignore[attr-defined]
    if isinstance(error, typer.Abort):
        return "aborted"
    if isinstance(error, (ValueError, RuntimeError, OSError, MemoryError, ImportError)) and str(error):
        return str(error)
    # Nothing that was foreseen: its kind says more than its text.
    return f"{type(error).__name__}: {error} (--debug shows where)"


def exit_code(error: Exception) -> int:
    """2 for bad input: a wrong command line, setting, model or file. 1 for everything else."""
    bad_input = (UsageError, ValueError, FileNotFoundError, IsADirectoryError, NotADirectoryError)
    return BAD_INPUT if isinstance(error, bad_input) else FAILED
