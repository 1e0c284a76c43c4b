"""Exports of every family at every tensor-parallel size and ZeRO stage, for a long run of the tests."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial

from tests.training.export_cases import CHOSEN, check
from tests.training.family_cases import possible


def cases(world: int) -> dict[str, Callable[[], None]]:
    found: dict[str, Callable[[], None]] = {}
    for family, tp, stage in itertools.product(CHOSEN["family"], CHOSEN["tp"], CHOSEN["stage"]):
        kv_heads = 3 if family == "falcon_grouped" else None
        row = {"family": family, "tp": tp, "stage": stage, "kv_heads": kv_heads, "vocab_size": 1003, "tied": None}
        if tp <= world and possible(row):
            found[str(row)] = partial(check, row)
    return found
