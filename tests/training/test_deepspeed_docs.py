"""docs/deepspeed.md says of every key what the code does with it. `python -m tests.training.test_deepspeed_docs` prints
the table as it must be."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import phalanx
from phalanx.layout.rules import LayerSpec, PartitionConfig
from phalanx.training.keys import ALIASES, HINTS, IMPLEMENTED, REFUSED
from phalanx.training.repoint import ELEMENTWISE
from phalanx.training.schedules import SCHEDULES

PAGE = Path(__file__).parents[2] / "docs" / "deepspeed.md"


def table() -> list[str]:
    rows = {name: ("implemented", note) for name, note in IMPLEMENTED.items()}
    rows |= {name: ("hint", note) for name, note in HINTS.items()}
    rows |= {name: ("refused", f"{r.note}; accepted: {r.accepted}") for name, r in REFUSED.items()}
    rows |= {name: ("old name", f"of `{new}`") for name, new in ALIASES.items()}
    order = sorted(rows, key=lambda name: ("." in name, name))
    head = ["| key | class | note |", "|---|---|---|"]
    return [*head, *(f"| `{name}` | {rows[name][0]} | {rows[name][1]} |" for name in order)]


def test_the_table_is_the_schema() -> None:
    page = PAGE.read_text().splitlines()
    assert page[page.index(table()[0]) :] == table()


def test_everything_else_is_named() -> None:
    page = PAGE.read_text()
    names = [field.name for kind in (PartitionConfig, LayerSpec) for field in fields(kind)]
    names += [kind.__name__ for kind in ELEMENTWISE] + list(SCHEDULES)
    calls = [name for name, home in phalanx._HOME_OF.items() if home.startswith("phalanx.training")]
    assert [name for name in names + calls if f"`{name}" not in page] == []


if __name__ == "__main__":
    print("\n".join(table()))
