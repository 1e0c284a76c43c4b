"""Models on the meta device get exactly their slices of a checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from phalanx.distributed.group import Group, SoloGroup
from phalanx.distributed.mesh import Mesh
from phalanx.distributed.thread_group import run_threads
from phalanx.parallel import from_pretrained, parallelize
from phalanx.weights.source import WeightError
from tests.parallel.models import CONFIGS, batch, tiny_model


@pytest.mark.parametrize("name", CONFIGS)
def test_every_family_loads_in_slices(name: str, tmp_path: Path) -> None:
    model = tiny_model(name, dtype=torch.float32)
    model.save_pretrained(tmp_path)
    inputs = batch(103)
    expected = model(**inputs).loss.detach()

    def rank(group: Group) -> Tensor:
        mine = from_pretrained(tmp_path).train()
        mine.config._experts_implementation = "eager"
        assert all(p.is_meta for p in mine.parameters())
        before = list(mine.parameters())
        parallelize(mine, Mesh(group, SoloGroup(), torch.device("cpu")))
        assert all(a is b for a, b in zip(before, mine.parameters(), strict=True))
        return mine(**inputs).loss.detach()

    for world in (1, 2):
        for loss in run_threads(world, rank):
            torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)


def test_dtype_and_config_changes(tmp_path: Path) -> None:
    tiny_model("llama", dtype=torch.float32).save_pretrained(tmp_path)
    mesh = Mesh(SoloGroup(), SoloGroup(), torch.device("cpu"))
    model = from_pretrained(tmp_path, dtype="bf16", attn_implementation="eager", rms_norm_eps=0.5)
    parallelize(model, mesh)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert model.config.rms_norm_eps == 0.5
    assert model.config._attn_implementation == "eager"


def test_all_faults_of_a_checkpoint_come_at_once(tmp_path: Path) -> None:
    tiny_model("llama", dtype=torch.float32).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.0.mlp.up_proj.weight"]
    tensors["model.norm.weight"] = torch.zeros(31)
    save_file(tensors, file, {"format": "pt"})
    model = from_pretrained(tmp_path)
    with pytest.raises(WeightError) as error:
        parallelize(model, Mesh(SoloGroup(), SoloGroup(), torch.device("cpu")))
    assert "model.layers.0.mlp.up_proj.weight" in str(error.value)
    assert "model.norm.weight is (31,) in the checkpoint, the model has (32,)" in str(error.value)


def test_a_truncated_file_is_found_before_anything_is_built(tmp_path: Path) -> None:
    tiny_model("llama", dtype=torch.float32).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(WeightError, match=r"model\.safetensors"):
        from_pretrained(tmp_path)


def test_tensors_that_the_model_has_no_place_for_are_told_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tiny_model("qwen2_tied", dtype=torch.float32).save_pretrained(tmp_path)
    mesh = Mesh(SoloGroup(), SoloGroup(), torch.device("cpu"))
    parallelize(from_pretrained(tmp_path), mesh)
    assert not caplog.records
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.0.self_attn.q_norm.weight"] = torch.zeros(8)
    tensors["lm_head.weight"] = torch.zeros(103, 32)
    save_file(tensors, file, {"format": "pt"})
    parallelize(from_pretrained(tmp_path), mesh)
    assert (
        "1 tensors of the checkpoint are not used by Qwen2ForCausalLM, model.layers.0.self_attn.q_norm" in caplog.text
    )
