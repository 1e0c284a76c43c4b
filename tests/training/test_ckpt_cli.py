"""``phalanx ckpt``: checkpoints of ranks, described, exported and merged by one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from phalanx.cli import app
from phalanx.training import checkpoint_folder
from tests.training.export_cases import tokens
from tests.training.ranks import run_cases


def run(*arguments: Any) -> Any:
    return CliRunner().invoke(app, ["ckpt", *map(str, arguments)])


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoints")
    (folder / "ranks").mkdir()
    results = run_cases(["tests.training.ckpt_cases"], 2, folder / "ranks")
    assert not [errors for errors in results.values() if errors], results
    return folder


def test_info(saved: Path) -> None:
    found = json.loads(run("info", saved / "llama", "--json").stdout)
    assert (found["tp"], found["dp"], found["stage"], found["global_steps"]) == (2, 1, 1, 1)
    assert found["architecture"] == "LlamaForCausalLM" and found["client_state"] == {"epoch": 7}
    state = torch.load(saved / "llama.pt")["state"]
    once = {value.data_ptr(): value.numel() for value in state.values()}
    assert found["parameters"] == sum(once.values())
    assert found["kinds"]["master"]["tensors"] == len(once)
    text = run("info", saved / "mixtral" / "global_step1").stdout
    assert "MixtralForCausalLM" in text and "tensor parallel 1 x data parallel 2, ZeRO stage 2" in text


@pytest.mark.parametrize(("name", "dtype"), [("llama", None), ("mixtral", None), ("mixtral", "bfloat16")])
def test_exports_are_models(saved: Path, tmp_path: Path, name: str, dtype: str | None) -> None:
    result = run("export", saved / name, tmp_path / "model", *(["--dtype", dtype] if dtype else []))
    assert result.exit_code == 0, result.output
    model, told = AutoModelForCausalLM.from_pretrained(tmp_path / "model", output_loading_info=True)
    assert not any(told[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), told
    expected = torch.load(saved / f"{name}.pt")
    if name == "llama":
        with torch.no_grad():
            logits = model(input_ids=tokens(1003)).logits
        torch.testing.assert_close(logits, expected["logits"], rtol=1e-5, atol=1e-5)
    else:
        assert model.dtype == (torch.bfloat16 if dtype else torch.float32)
        for key, value in model.state_dict().items():
            assert torch.equal(value.to(torch.bfloat16), expected["state"][key]), key
        with safe_open(tmp_path / "model" / "model.safetensors", "pt") as file:
            assert "model.layers.0.block_sparse_moe.experts.0.w1.weight" in file.keys()  # noqa: SIM118


def test_a_merged_checkpoint_goes_on(saved: Path, tmp_path: Path) -> None:
    result = run("merge", saved / "moments", saved / "merged")
    assert result.exit_code == 0, result.output
    assert len(list((saved / "merged" / "global_step2").glob("*.safetensors"))) == 1
    (saved / "merged" / "latest").write_text("global_step3")
    assert run("merge", saved / "moments", saved / "merged").exit_code == 0
    assert (saved / "merged" / "latest").read_text() == "global_step3"
    (saved / "merged" / "latest").write_text("global_step2")
    (saved / "again").mkdir()
    results = run_cases(["tests.training.merged_cases"], 2, saved / "again")
    assert results and not [errors for errors in results.values() if errors], results


def test_a_merge_that_fails_leaves_nothing(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, folder = saved / "llama" / "global_step1", tmp_path / "merged"

    def full_disk(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    for broken in ("save_file", "write_text"):
        with monkeypatch.context() as patch:
            patch.setattr(checkpoint_folder, broken, full_disk)
            result = run("merge", source, folder)
            assert result.exit_code != 0 and "No space left" in result.output
        assert not folder.exists()
    # A killed one leaves what it had written: the next is not hindered, and clears it.
    partial = folder / ".global_step1.partial"
    partial.mkdir(parents=True)
    (partial / "rank-00000-00007.safetensors").write_text("half")
    assert run("merge", source, folder).exit_code == 0
    assert sorted(path.name for path in folder.iterdir()) == ["global_step1", "latest"]
    assert len(list((folder / "global_step1").iterdir())) == 2
    # What was there before stays.
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    (tmp_path / "cut" / "global_step1").mkdir(parents=True)
    for path in source.iterdir():
        data = path.read_bytes()
        (tmp_path / "cut" / "global_step1" / path.name).write_bytes(data if path.suffix == ".json" else data[:-8])
    result = run("merge", tmp_path / "cut" / "global_step1", folder)
    assert result.exit_code == 2 and "cannot be read" in result.output
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before


def test_what_cannot_be_done_is_said(saved: Path, tmp_path: Path) -> None:
    result = run("info", tmp_path)
    assert result.exit_code == 2 and "neither an index.json nor a file called latest" in result.output
    (tmp_path / "broken").mkdir()
    index = json.loads((saved / "llama" / "global_step1" / "index.json").read_text())
    for text, said in [
        ("[]", "holds no object"),
        (json.dumps({**index, "tp": 1, "x": 1}).replace('"tp"', '"t"'), "lacks tp"),
    ]:
        (tmp_path / "broken" / "index.json").write_text(text)
        for command in (["info"], ["export", tmp_path / "m"], ["merge", tmp_path / "m"]):
            result = run(command[0], tmp_path / "broken", *command[1:])
            assert result.exit_code == 2 and said in result.output
    (tmp_path / "latest").write_text("\n")
    result = run("info", tmp_path)
    assert result.exit_code == 2 and "does not name a checkpoint" in result.output
    result = run("export", saved / "llama", tmp_path / "model", "--dtype", "int3")
    assert result.exit_code == 2 and "int3" in result.output
