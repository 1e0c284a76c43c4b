"""`phalanx check` on the command line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.engine.test_check import CONFIG


def run(*args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "phalanx.cli", "check", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=240)


def test_from_weights_and_from_a_config(tiny_folder: Path, tmp_path: Path) -> None:
    done = run(str(tiny_folder), "--json", "--tp", "1,2", "--tokens", "12")
    assert done.returncode == 0, done.stderr + done.stdout
    found = json.loads(done.stdout)
    assert found["weights"] == "real"
    assert {each["tp"] for each in found["comparisons"]} == {1, 2}
    assert all(each["first"] is None for each in found["comparisons"])
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    done = run(str(tmp_path), "--tp", "1")
    assert done.returncode == 0, done.stderr + done.stdout
    assert "random weights" in done.stdout
    assert "Equal at every layer" in done.stdout


def test_a_plugin_with_a_fault(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "faulty_plugin.py").write_text(
        "from phalanx.models import TransformerModel\n"
        "from phalanx.models.llama import LlamaPolicy\n"
        "class Faulty(TransformerModel):\n"
        "    norm_eps = 0.5\n"
        "class FaultyPolicy(LlamaPolicy, replace=True):\n"
        "    model_types = ('llama',)\n"
        "    model_class = Faulty\n"
    )
    command = [sys.executable, "-m", "phalanx.cli", "check", str(tmp_path), "--tp", "1", "--plugin", "faulty_plugin"]
    environment = {"PYTHONPATH": f"{tmp_path}:{Path(__file__).parents[2] / 'src'}", "PATH": "/usr/bin:/bin"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment)
    assert done.returncode == 1, done.stderr + done.stdout
    assert "First difference: layer 0: attention" in " ".join(done.stdout.split())


def test_bad_sizes_are_refused(tiny_folder: Path) -> None:
    done = run(str(tiny_folder), "--tp", "0,x")
    assert done.returncode == 2
    assert "expected sizes such as 1,2" in done.stderr
