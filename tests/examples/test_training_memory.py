"""A model that is loaded in slices needs less memory than one that is loaded whole and cut."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.examples.training_cases import FOLDER, example


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama-40m")
    example("memory").write_random(str(FOLDER / "configs" / "llama-40m.json"), str(folder))
    return folder


def peaks(folder: Path, load: str) -> dict[str, tuple[int, int]]:
    """MiB after each stage: of the rank with least, and with most."""
    command = [sys.executable, "-m", "phalanx.cli", "launch", "--nproc", "2", str(FOLDER / "memory.py")]
    given = ["--model", str(folder), "--tp", "2", "--load", load, "--length", "4"]
    done = subprocess.run([*command, *given], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    lines = re.findall(r"^(after [a-z ]+?) +peak +MiB: least (\d+) most (\d+)", done.stdout, re.MULTILINE)
    return {when: (int(least), int(most)) for when, least, most in lines}


def test_slices_need_less(folder: Path) -> None:
    whole, slices = peaks(folder, "whole"), peaks(folder, "slices")
    assert list(whole) == list(slices) == ["after load", "after initialize", "after the steps"]
    model = (folder / "model.safetensors").stat().st_size / 2**20
    # Whole, a rank has all of it before it keeps half; in slices it never has.
    assert whole["after initialize"][0] > 1.4 * model
    assert slices["after initialize"][1] < 1.3 * model
