"""Every pair of the factors of `family_cases`."""

from __future__ import annotations

from collections.abc import Callable

from tests.training.family_cases import of_rows, rows


def cases(world: int) -> dict[str, Callable[[], None]]:
    return of_rows(rows(world))
