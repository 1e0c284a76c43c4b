"""Trainers of transformers on ranks."""

from __future__ import annotations

from pathlib import Path

from tests.training.ranks import run_cases


def test_trainers(tmp_path: Path) -> None:
    for world in (1, 2, 4):
        folder = tmp_path / f"world{world}"
        folder.mkdir()
        results = run_cases(["tests.training.hf_cases"], world, folder, timeout=400)
        failed = [f"{case} on {world} ranks: {errors[0]}" for case, errors in results.items() if errors]
        assert results and not failed, "\n".join(failed)
