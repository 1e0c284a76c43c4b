"""LoRA under tensor parallelism and ZeRO."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.training.ranks import run_cases

pytest.importorskip("peft")


def check(module: str, world: int, folder: Path, timeout: float) -> None:
    results = run_cases([module], world, folder, timeout=timeout)
    failed = [f"{case} on {world} ranks: {errors[0]}" for case, errors in results.items() if errors]
    assert results and not failed, "\n".join(failed)


@pytest.mark.parametrize("world", [2, 4])
def test_adapters_are_those_of_one_process(world: int, tmp_path: Path) -> None:
    check("tests.training.peft_short_cases", world, tmp_path, 400)


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_adapters_of_all_kinds(world: int, tmp_path: Path) -> None:
    check("tests.training.peft_cases", world, tmp_path, 1800)
