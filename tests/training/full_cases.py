"""Every combination of the factors of `family_cases` for Llama."""

from __future__ import annotations

from collections.abc import Callable

from tests.training import family_cases


def cases(world: int) -> dict[str, Callable[[], None]]:
    return family_cases.cases(world, full=True)
