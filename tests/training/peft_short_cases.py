"""Some of the rows of `peft_cases`, for every run of the tests."""

from __future__ import annotations

from collections.abc import Callable

from tests.training import peft_cases


def cases(world: int) -> dict[str, Callable[[], None]]:
    return peft_cases.cases(world, full=False)
