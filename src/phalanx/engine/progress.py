"""A progress bar for people who wait, and nothing for programs that read."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Report = Callable[[int, int], None]
"""Told (done, all)."""


@contextmanager
def progress(title: str, shown: bool = True) -> Iterator[Report]:
    """A bar on stderr while the block runs, where stderr is a terminal and ``shown`` says so."""
    if not shown or not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
