"""A run may end at any moment: its last complete checkpoint loads."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from phalanx.training.checkpoint_folder import Saved
from phalanx.training.checkpoint_tools import find
from tests.training.ranks import run_cases


@pytest.mark.parametrize("kills", [1, pytest.param(20, marks=pytest.mark.slow)])
def test_killed_at_random_moments(kills: int, tmp_path: Path) -> None:
    chance, last = random.Random(kills), 0
    for number in range(kills):
        command = [sys.executable, "-m", "tests.training.crash_run"]
        started = [
            subprocess.Popen([*command, str(rank), str(tmp_path), str(tmp_path / f"meet{number}"), str(number)])
            for rank in range(2)
        ]
        try:
            wait_for(started, [tmp_path / f"run{number}-rank{rank}" for rank in range(2)] + [tmp_path / "latest"])
            time.sleep(chance.uniform(0, 1.5))
            assert [process.poll() for process in started] == [None, None]
        finally:
            for process in started:
                process.kill()
                process.wait()
        with Saved(find(tmp_path)) as saved:
            for entry in saved.entries:
                saved.read(entry)
            assert saved.index["global_steps"] == saved.index["client_state"]["steps"] >= last
            last = saved.index["global_steps"]
    assert last > kills // 2


def wait_for(started: list[subprocess.Popen[bytes]], paths: list[Path]) -> None:
    deadline = time.monotonic() + 120
    while not all(path.exists() for path in paths):
        assert [process.poll() for process in started] == [None, None], "a run could not go on"
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_rank_that_cannot_write(tmp_path: Path) -> None:
    results = run_cases(["tests.training.crash_cases", "tests.training.odd_save_cases"], 2, tmp_path)
    assert results and not [errors for errors in results.values() if errors], results
