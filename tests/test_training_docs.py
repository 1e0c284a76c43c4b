"""The training guide's code runs, and what it names is there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.examples.forked_ranks import run_cases
from tests.training_docs_cases import BLOCKS, PAGE

CONFIGS = PAGE.parents[1] / "examples" / "training" / "configs"


def test_the_code_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder, config in {"llama": "llama-tiny.json", "pythia": "gpt-neox-tiny.json"}.items():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(CONFIGS / config)).save_pretrained(
            tmp_path / folder
        )
    results = run_cases(("tests.training_docs_cases",), 2, tmp_path, {"TRAINING_DOCS_MODELS": str(tmp_path)})
    assert len(results) == len(BLOCKS) + 1 > 7
    failed = [f"{case}: {errors[0]}" for case, errors in results.items() if errors]
    assert not failed, "\n".join(failed)


def test_the_files_it_names_are_there() -> None:
    text = PAGE.read_text()
    for target in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (PAGE.parent / target).exists(), target


def test_the_commands_it_names_are_there() -> None:
    shown = subprocess.run([sys.executable, "-m", "phalanx.cli", "--help"], capture_output=True, text=True, check=True)
    named = set(re.findall(r"phalanx ([a-z]+)", PAGE.read_text().replace("import phalanx", "")))
    assert {"launch", "plan"} <= named & set(re.findall(r"│ (\w+) ", shown.stdout))
