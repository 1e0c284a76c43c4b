"""The Trainer's example logs the same on every grid of ranks."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from tests.examples.training_cases import FOLDER

pytestmark = pytest.mark.skipif(not importlib.util.find_spec("accelerate"), reason="accelerate is not installed")


def logged(folder: Path, ranks: int, *more: str) -> list[tuple[float, float]]:
    """(loss, norm) of each step."""
    command = [sys.executable, "-m", "phalanx.cli", "launch", "--no-local-rank", "--nproc", str(ranks)]
    command += [str(FOLDER / "trainer.py"), "--use_cpu", "--output_dir", str(folder), "--report_to", "none", *more]
    command += ["--max_steps", "3", "--logging_steps", "1", "--disable_tqdm", "true", "--save_strategy", "no"]
    ran = subprocess.run(
        command, capture_output=True, text=True, timeout=200, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert ran.returncode == 0, ran.stderr
    found = re.findall(r"'loss': '?([\d.]+)'?, 'grad_norm': '?([\d.]+)", ran.stdout)
    return [(float(loss), float(norm)) for loss, norm in found]


@pytest.mark.slow
def test_the_trainer(tmp_path: Path) -> None:
    alone = logged(tmp_path / "alone", 1, "--per_device_train_batch_size", "4")
    cut = logged(tmp_path / "cut", 2, "--per_device_train_batch_size", "4", "--tp", "2")
    # As many digits as are logged.
    assert len(alone) == 3 and sum(cut, ()) == pytest.approx(sum(alone, ()), rel=1e-3)
    AutoModelForCausalLM.from_pretrained(tmp_path / "cut")
