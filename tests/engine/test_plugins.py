"""Modules named as plugins are imported before the model is built, on every rank."""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx import LLM
from phalanx.config import ConfigError

PLUGIN = """
from phalanx.models import InferencePolicy
from phalanx.models.llama import LlamaPolicy

class MinePolicy(LlamaPolicy):
    model_types = ("plugged_in",)
"""


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_plugin_declares_a_model(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int
) -> None:
    # Ranks that are started import what this process can import.
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / f"phalanx_test_plugin_{ranks}.py").write_text(PLUGIN.replace("plugged_in", f"plugged_in_{ranks}"))
    folder = tmp_path / "model"
    folder.mkdir()
    for file in tiny_folder.iterdir():
        text = file.read_bytes()
        if file.name == "config.json":
            text = text.replace(b'"model_type": "llama"', f'"model_type": "plugged_in_{ranks}"'.encode())
        (folder / file.name).write_bytes(text)
    settings = {"num_blocks": 8, "device": "cpu", "tensor_parallel_size": ranks}
    with LLM(folder, settings, plugins=(f"phalanx_test_plugin_{ranks}",)) as llm:
        assert len(llm.generate([5, 6, 7], max_tokens=3)[0].outputs[0].token_ids) == 3


def test_an_absent_plugin_is_named(tiny_folder: Path) -> None:
    with pytest.raises(ConfigError, match="'no_such_package' cannot be imported"):
        LLM(tiny_folder, plugins=("no_such_package",))
