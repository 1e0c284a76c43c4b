from pathlib import Path

import pytest

from tests.training.ranks import run_cases

MODULES = {
    2: ["engine_cases", "precision_cases", "sharded_cases", "agreement_cases", "plan_cases", "compile_cases"],
    4: ["grid_cases"],
}


@pytest.mark.parametrize("world", [2, 4])
def test_engine(world: int, tmp_path: Path) -> None:
    results = run_cases([f"tests.training.{module}" for module in MODULES[world]], world, tmp_path)
    failed = [f"{case} on {world} ranks: {errors[0]}" for case, errors in results.items() if errors]
    assert results and not failed, "\n".join(failed)
