"""Exports reload in stock transformers and compute the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.training.ranks import run_cases


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_exports_are_the_model(world: int, tmp_path: Path) -> None:
    results = run_cases(["tests.training.export_cases"], world, tmp_path, timeout=600)
    failed = [f"{case} on {world} ranks: {errors[0]}" for case, errors in results.items() if errors]
    assert results and not failed, "\n".join(failed)


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_every_family_size_and_stage(world: int, tmp_path: Path) -> None:
    results = run_cases(["tests.training.export_full_cases"], world, tmp_path, timeout=3600)
    failed = [f"{case} on {world} ranks: {errors[0]}" for case, errors in results.items() if errors]
    assert results and not failed, "\n".join(failed)
