"""Checkpoints: written by one grid of ranks and read by any, whole after any crash, and refused where they do not fit."""

from __future__ import annotations

from pathlib import Path

from tests.training.ranks import run_cases


def test_a_run_goes_on_alike_on_any_grid(tmp_path: Path) -> None:
    for world in (4, 2, 1):
        folder = tmp_path / f"world{world}"
        folder.mkdir()
        results = run_cases(["tests.training.reshard_cases"], world, folder, timeout=400)
        failed = [f"{case} on {world} ranks: {errors[0]}" for case, errors in results.items() if errors]
        assert results and not failed, "\n".join(failed)
