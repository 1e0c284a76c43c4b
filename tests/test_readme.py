"""The README's code runs."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

from phalanx.models import POLICIES, load_families

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "README.md").read_text()
ALL_BLOCKS = re.findall(r"^```python\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
BLOCKS = [block for block in ALL_BLOCKS if "init_distributed" not in block]
TRAINING = [block for block in ALL_BLOCKS if "init_distributed" in block]


@pytest.mark.parametrize("model", ["tiny", pytest.param("smollm2", marks=pytest.mark.slow)])
@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_the_code_runs(
    block: str,
    model: str,
    tiny_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    code = block.replace('"smollm2"', repr(str(tiny_folder))) if model == "tiny" else block
    name = f"readme_block_{BLOCKS.index(block)}_{model}"
    # A module of its own: classes look for names where they were defined.
    (tmp_path / f"{name}.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    load_families()
    known = dict(POLICIES)
    try:
        importlib.import_module(name)
    finally:
        sys.modules.pop(name, None)
        POLICIES.clear()
        POLICIES.update(known)
    out = capsys.readouterr().out
    if model == "smollm2" and "capital of France" in block:
        assert "Paris" in out
    if "engine.query(" in block:
        assert out == "(76, 4)\nBatchTokenLimitExceeded\n" and all(line in block for line in out.splitlines())


@pytest.mark.parametrize("block", TRAINING, ids=range(len(TRAINING)))
def test_the_training_code_runs_on_two_ranks(block: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(block)
    command = [sys.executable, "-m", "phalanx.cli", "launch", "--nproc", "2", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    # Both ranks print, perhaps at the same moment on one line, and say the same.
    losses = re.findall(r"step \d loss \d+\.\d{4} norm \d+\.\d{4}", done.stdout)
    assert len(losses) == 6 and len(set(losses)) == 3


def test_the_files_it_names_are_there() -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", TEXT):
        assert (ROOT / target).exists(), target


def test_the_commands_it_lists_are_those_there_are() -> None:
    done = subprocess.run([sys.executable, "-m", "phalanx.cli", "--help"], capture_output=True, text=True, check=True)
    listed = set(re.findall(r"\| `phalanx (\w+)", TEXT))
    assert listed and listed <= set(re.findall(r"│ (\w+) ", done.stdout))


def test_the_flags_it_lists_are_those_there_are() -> None:
    command = [sys.executable, "-m", "phalanx.cli", "generate", "--help"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    section = TEXT[TEXT.index("## Command line") : TEXT.index("## What is supported")]
    flags = set(re.findall(r"--[a-z][a-z-]+", section)) - {"--peer", "--nproc", "--resume", "--output"}
    assert len(flags) > 20 and [flag for flag in sorted(flags) if flag not in shown] == []
