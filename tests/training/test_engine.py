from pathlib import Path

import pytest

from tests.training.ranks import run_cases

MODULES = ("tests.training.engine_cases", "tests.training.precision_cases", "tests.training.sharded_cases")


@pytest.mark.parametrize("world", [2, 4])
def test_engine(world: int, tmp_path: Path) -> None:
    results = run_cases(MODULES, world, tmp_path)
    failed = [f"{case} on {world} ranks: {errors[0]}" for case, errors in results.items() if errors]
    assert not failed, "\n".join(failed)
