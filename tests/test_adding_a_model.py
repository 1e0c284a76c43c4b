"""The guide to adding a model: its code, put together as it says, reaches parity."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from phalanx.cli.check import compare
from phalanx.config import ConfigError, EngineConfig
from phalanx.engine.check import random_reference
from phalanx.engine.opened_model import load_policies
from phalanx.models import POLICIES, HFConfig, load_families

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "docs" / "adding-a-model.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
CONFIG = {
    "model_type": "arcee",
    "hidden_size": 256,
    "intermediate_size": 400,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 200,
    "hidden_act": "relu2",
    "pad_token_id": 0,
}


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on the path that holds my_arcee.py as the guide writes it."""
    (tmp_path / "my_arcee.py").write_text("\n\n".join(BLOCKS[:3]))
    monkeypatch.syspath_prepend(str(tmp_path))
    load_families()
    known = dict(POLICIES)
    yield tmp_path
    sys.modules.pop("my_arcee", None)
    POLICIES.clear()
    POLICIES.update(known)


def test_its_model_equals_transformers(package: Path) -> None:
    (package / "config.json").write_text(json.dumps(CONFIG))
    found = compare(
        str(package / "config.json"), random=True, tokens=17, tp=[1, 2], seed=0, plugins=["my_arcee"], progress=str
    )
    assert POLICIES["arcee"].__module__ == "my_arcee"
    assert len(found["comparisons"]) == 6
    assert all(each.first is None for each in found["comparisons"])
    # The generic path has no layers of its own to look into.
    assert len(found["comparisons"][0].points) == 7


def test_it_is_served_over_two_ranks(package: Path) -> None:
    random_reference(HFConfig(CONFIG)).save_pretrained(package / "model")
    script = package / "serve.py"
    script.write_text(BLOCKS[3].replace("path/to/arcee", str(package / "model")))
    environment = {"PYTHONPATH": f"{package}:{ROOT / 'src'}", "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=200, env=environment)
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)) == 4


def announce(folder: Path, module: str) -> None:
    info = folder / "my_models-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-models\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[phalanx.models]\narcee = {module}\n")


def test_an_installed_package_announces_its_models(package: Path) -> None:
    announce(package, "my_arcee")
    importlib.invalidate_caches()
    assert "arcee" not in POLICIES
    load_policies(EngineConfig())
    assert POLICIES["arcee"].__module__ == "my_arcee"


def test_a_broken_announcement_is_named(package: Path) -> None:
    announce(package, "my_absent_models")
    importlib.invalidate_caches()
    with pytest.raises(ConfigError, match=r"my-models announces models in 'my_absent_models'"):
        load_policies(EngineConfig())


def test_the_files_it_names_are_there() -> None:
    for target in re.findall(r"\]\((\.\.[^)#:]+)\)", TEXT):
        assert (ROOT / "docs" / target).exists(), target
