"""Checkpoints: written by one grid of ranks and read by any, and refused where they are broken."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from phalanx.training import checkpoint_folder
from phalanx.training.checkpoint_folder import FORMAT, VERSION, CheckpointError, Saved
from tests.training.ranks import run_cases


def test_a_run_goes_on_alike_on_any_grid(tmp_path: Path) -> None:
    for world in (4, 2, 1):
        folder = tmp_path / f"world{world}"
        folder.mkdir()
        results = run_cases(["tests.training.reshard_cases"], world, folder, timeout=400)
        failed = [f"{case} on {world} ranks: {errors[0]}" for case, errors in results.items() if errors]
        assert results and not failed, "\n".join(failed)


def test_a_broken_checkpoint_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "here"
    path.mkdir()
    with pytest.raises(CheckpointError, match=r"no index\.json"):
        Saved(path)
    save_file({"0": torch.arange(6.0).view(2, 3)}, path / "a.safetensors")
    entry = {"shape": [2, 3], "dtype": "float32", "boxes": [["a.safetensors", "0", [0, 0], [2, 3]]]}

    def written(**changes: object) -> Saved:
        told = {
            **dict.fromkeys(checkpoint_folder._SAID),
            "format": FORMAT,
            "version": VERSION,
            "entries": {"x": {**entry, **changes}},
        }
        (path / "index.json").write_text(json.dumps(told))
        return Saved(path)

    with written() as saved:
        assert torch.equal(saved.read("x"), torch.arange(6.0).view(2, 3))
        assert torch.equal(saved.read("x", (slice(1, 2), slice(0, 2))), torch.tensor([[3.0, 4.0]]))
    for fault, changes in [
        ("is not covered", {"shape": [3, 3]}),
        ("is not covered", {"boxes": []}),
        ("where the index says", {"shape": [2, 4], "boxes": [["a.safetensors", "0", [0, 0], [2, 4]]]}),
        ("cannot be read", {"boxes": [["b.safetensors", "0", [0, 0], [2, 3]]]}),
        ("cannot be read", {"boxes": [["a.safetensors", "1", [0, 0], [2, 3]]]}),
        ("outside of the checkpoint", {"boxes": [["../a.safetensors", "0", [0, 0], [2, 3]]]}),
        ("unknown dtype", {"dtype": "float33"}),
        ("is broken", {"boxes": [["a.safetensors", "0", [0], [2, 3]]]}),
        ("is broken", {"shape": [-2, 3]}),
        ("is broken", {"boxes": None}),
    ]:
        with pytest.raises(CheckpointError, match=fault), written(**changes) as saved:
            saved.read("x")
    (path / "index.json").write_text('{"format": "else"}')
    with pytest.raises(CheckpointError, match="expected 'phalanx training checkpoint'"):
        Saved(path)
