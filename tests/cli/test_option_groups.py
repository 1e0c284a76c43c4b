from dataclasses import dataclass, field
from typing import Annotated

import typer
from typer.testing import CliRunner

from phalanx.cli.option_groups import grouped


@dataclass(frozen=True)
class Size:
    width: Annotated[int, typer.Option("--width")]
    height: Annotated[int, typer.Option("--height")] = 3
    tag: Annotated[list[str], typer.Option("--tag")] = field(default_factory=list)


def test_groups_become_options_and_arrive_as_objects():
    seen = []
    app = typer.Typer()

    @app.command()
    @grouped
    def draw(name: Annotated[str, typer.Argument()], loud: bool = False, *, size: Size) -> None:
        """Draws."""
        seen.append((name, loud, size))

    def run(*arguments):
        return CliRunner().invoke(app, arguments)

    assert run("a", "--width", "2", "--tag", "x", "--tag", "y", "--loud").exit_code == 0
    assert run("b", "--width", "5").exit_code == 0
    assert seen == [("a", True, Size(2, 3, ["x", "y"])), ("b", False, Size(5))]
    assert run("c").exit_code == 2
    assert "--height" in run("--help").stdout and "Draws." in run("--help").stdout
