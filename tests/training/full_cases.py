"""Every combination of the factors of `family_cases` for Llama."""

from __future__ import annotations

from collections.abc import Callable

from tests.training.family_cases import full_rows, of_rows


def cases(world: int) -> dict[str, Callable[[], None]]:
    return of_rows(full_rows(world))
