"""Trainers of transformers and TRL on ranks, and the package that stands in for DeepSpeed."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.training.ranks import run_cases

SHIM = Path(__file__).parents[2] / "shim"


def passed(modules: str, worlds: Sequence[int], folder: Path) -> None:
    for world in worlds:
        own = folder / f"{modules}-{world}"
        own.mkdir()
        results = run_cases([f"tests.training.{modules}"], world, own, timeout=400)
        failed = [f"{case} on {world} ranks: {errors[0]}" for case, errors in results.items() if errors]
        assert results and not failed, "\n".join(failed)


def install_shim(folder: Path, version: str | None = None) -> None:
    """As pip would, into a folder that is put on the path."""
    shutil.copytree(SHIM / "deepspeed", folder / "deepspeed")
    version = version or tomllib.loads((SHIM / "pyproject.toml").read_text())["project"]["version"]
    about = folder / f"deepspeed-{version}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: deepspeed\nVersion: {version}\n")


def on_path(folder: Path) -> str:
    return os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))


NEEDS_ACCELERATE = pytest.mark.skipif(not importlib.util.find_spec("accelerate"), reason="accelerate is not installed")


@NEEDS_ACCELERATE
def test_trainers_and_the_package_named_deepspeed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    passed("hf_cases", (1, 2, 4), tmp_path)
    install_shim(tmp_path / "shim")
    monkeypatch.setenv("PYTHONPATH", on_path(tmp_path / "shim"))
    passed("hf_shim_cases", (2,), tmp_path)


@pytest.mark.slow
@NEEDS_ACCELERATE
def test_all_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    passed("hf_all_cases", (1, 2, 4), tmp_path)
    install_shim(tmp_path / "shim")
    monkeypatch.setenv("PYTHONPATH", on_path(tmp_path / "shim"))
    passed("hf_shim_cases", (4,), tmp_path)


@pytest.mark.slow
@pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("trl", "peft")), reason="trl or peft is not installed"
)
def test_trainers_of_trl(tmp_path: Path) -> None:
    passed("hf_trl_cases", (1, 2, 4), tmp_path)


def test_the_stand_in_refuses_to_stand_before_deepspeed(tmp_path: Path) -> None:
    install_shim(tmp_path, version="0.19.8")
    environment = {**os.environ, "PYTHONPATH": on_path(tmp_path)}
    ran = subprocess.run([sys.executable, "-c", "import deepspeed"], env=environment, capture_output=True, text=True)
    assert ran.returncode == 1 and "pip uninstall deepspeed" in ran.stderr
