"""Cases that need processes, all in one group of two; the cases stand in `rank_cases`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.parallel.rank_cases import CASES

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    result = tmp_path_factory.mktemp("ranks") / "outcomes.json"
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    run = subprocess.run(
        [*launch, "-m", "tests.parallel.rank_cases", str(result)],
        cwd=ROOT,
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([f"{ROOT}/src", os.environ.get("PYTHONPATH", "")]),
        },
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    outcome: dict[str, str] = json.loads(result.read_text())
    return outcome


@pytest.mark.xdist_group("parallel ranks")
@pytest.mark.parametrize("case", CASES)
def test_case(case: str, outcomes: dict[str, str]) -> None:
    assert outcomes[case] == "ok"
