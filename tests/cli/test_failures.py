import json
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from phalanx.cli.failures import Commands, Failure
from phalanx.config import ConfigError
from phalanx.weights import WeightError


def run(error, *flags):
    """An app whose command raises this."""
    app = typer.Typer(cls=Commands)

    @app.command()
    def work(
        json: Annotated[bool, typer.Option("--json")] = False, debug: Annotated[bool, typer.Option("--debug")] = False
    ) -> None:
        raise error

    @app.command()
    def other() -> None: ...

    return CliRunner().invoke(app, ["work", *flags])


ERRORS = [
    (ConfigError("block_size: too small"), 2, "block_size: too small"),
    (WeightError("first", "second"), 2, "first\nsecond"),
    (FileNotFoundError(2, "No such file", "x.jsonl"), 2, "[Errno 2] No such file: 'x.jsonl'"),
    (typer.BadParameter("not that"), 2, "Invalid value: not that"),
    (Failure("the download broke"), 1, "the download broke"),
    (RuntimeError("rank 1 died"), 1, "rank 1 died"),
    (MemoryError("no room"), 1, "no room"),
    (KeyError("x"), 1, "KeyError: 'x' (--debug shows where)"),
    (AssertionError(), 1, "AssertionError:  (--debug shows where)"),
    (KeyboardInterrupt(), 130, ""),
    (typer.Exit(7), 7, ""),
]


@pytest.mark.parametrize(("error", "code", "message"), ERRORS)
def test_errors_are_a_message_and_an_exit_code(error, code, message):
    done = run(error)
    assert done.exit_code == code and done.stdout == ""
    assert "Traceback" not in done.stderr and message in done.stderr


@pytest.mark.parametrize(("error", "code", "message"), ERRORS[:-2])
def test_errors_as_json(error, code, message):
    done = run(error, "--json")
    assert done.exit_code == code
    assert json.loads(done.stdout)["error"] == {"type": type(error).__name__, "message": message}


def test_debug_shows_the_traceback():
    done = run(ConfigError("bad"), "--debug", "--json")
    assert "Traceback" in done.stderr and json.loads(done.stdout)["error"]["message"] == "bad"


def test_a_wrong_option_is_told_as_json():
    done = run(None, "--json", "--jsno")
    assert done.exit_code == 2 and "--json" in json.loads(done.stdout)["error"]["message"]


def test_a_reader_that_has_gone_ends_quietly(tmp_path, monkeypatch):
    # The handler points file descriptor 1 elsewhere: a stand-in takes the place of pytest's own.
    import sys

    with open(tmp_path / "out", "w") as out:
        monkeypatch.setattr(sys, "stdout", out)
        app = typer.Typer(cls=Commands)

        @app.command()
        def work() -> None:
            raise BrokenPipeError

        @app.command()
        def other() -> None: ...

        with pytest.raises(SystemExit) as end:
            app(["work"])
    assert end.value.code == 1
