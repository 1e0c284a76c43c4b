"""The scripts in `benchmarks/` are not part of the package: a name that moves there must move in them too."""

import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted(path.relative_to(ROOT).with_suffix("") for path in (ROOT / "benchmarks").rglob("*.py"))


@pytest.mark.parametrize("script", SCRIPTS, ids=str)
def test_every_benchmark_can_be_imported(script):
    if script.parts[1] == "kernels":
        pytest.importorskip("triton")
    importlib.import_module(".".join(script.parts))
