"""A model that is loaded in slices needs less memory than one that is loaded whole; an example through the launcher."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.examples.forked_ranks import run_example
from tests.examples.training_cases import FOLDER, example


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama-40m")
    example("memory").write_random(str(FOLDER / "configs" / "llama-40m.json"), str(folder))
    return folder


def peaks(model: Path, load: str, folder: Path) -> dict[str, tuple[int, int]]:
    """MiB after each stage: of the rank with least, and with most."""
    text = run_example("memory", ["--model", str(model), "--tp", "2", "--load", load, "--length", "4"], 2, folder)
    lines = re.findall(r"^(after [a-z ]+?) +peak +MiB: least (\d+) most (\d+)", text, re.MULTILINE)
    return {when: (int(least), int(most)) for when, least, most in lines}


def test_slices_need_less(model: Path, tmp_path: Path) -> None:
    whole, slices = peaks(model, "whole", tmp_path), peaks(model, "slices", tmp_path)
    assert list(whole) == list(slices) == ["after load", "after initialize", "after the steps"]
    size = (model / "model.safetensors").stat().st_size / 2**20
    # Whole, a rank has all of it before it keeps half; in slices it never has.
    assert whole["after initialize"][0] > 1.4 * size
    assert slices["after initialize"][1] < 1.3 * size


def test_through_the_launcher() -> None:
    command = [sys.executable, "-m", "phalanx.cli", "launch", "--nproc", "2", str(FOLDER / "custom_patterns.py")]
    done = subprocess.run([*command, "--tp", "2", "--steps", "2"], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert [line.split(" loss")[0] for line in done.stdout.splitlines()[1:]] == ["step 0", "step 1"]
