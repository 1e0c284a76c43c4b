"""Families x meshes x ZeRO stages x accumulation x clipping x sequence parallelism x KV heads x vocabularies."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from tests.training.family_cases import FACTORS, possible, rows
from tests.training.ranks import run_cases


def check(module: str, world: int, folder: Path, timeout: float) -> None:
    results = run_cases([f"tests.training.{module}"], world, folder, timeout=timeout)
    failed = [f"{case} on {world} ranks: {errors[0]}" for case, errors in results.items() if errors]
    assert results and not failed, "\n".join(failed)


@pytest.mark.parametrize("world", [2, 4])
def test_some_pairs_of_factors(world: int, tmp_path: Path) -> None:
    check("family_cases", world, tmp_path, 900)


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_every_pair_of_factors(world: int, tmp_path: Path) -> None:
    check("pair_cases", world, tmp_path, 1800)


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_every_combination_for_llama(world: int, tmp_path: Path) -> None:
    check("full_cases", world, tmp_path, 7200)


def test_the_rows_hold_every_possible_pair() -> None:
    chosen = rows(4)
    for a, b in itertools.combinations(FACTORS, 2):
        for x, y in itertools.product(FACTORS[a], FACTORS[b]):
            if possible({a: x, b: y}):
                assert any(row[a] == x and row[b] == y for row in chosen), (a, x, b, y)
