import json
import os

import pytest
import torch

from phalanx.weights import WeightError, open_source


@pytest.fixture
def tensors():
    base = torch.arange(20.0).reshape(4, 5)
    return {"a": base, "t": base.t(), "h": torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))}


@pytest.mark.parametrize("zipped", [True, False])
def test_reads_what_was_written(tmp_path, tensors, zipped):
    torch.save(tensors, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=zipped)
    source = open_source(tmp_path)
    assert source.verify() == [] and source.names() == list(tensors)
    for name, value in tensors.items():
        assert source.info(name) == (tuple(value.shape), value.dtype)
        read = source.read(name)
        assert torch.equal(read, value) and read.is_contiguous() and not read.requires_grad
    part = source.tensor("t")[1:3, :2]
    assert torch.equal(part, tensors["t"][1:3, :2]) and part.untyped_storage().nbytes() == part.nbytes


def test_reads_shards(tmp_path, tensors):
    weight_map = {name: f"pytorch_model-{i}.bin" for i, name in enumerate(tensors)}
    for name, file in weight_map.items():
        torch.save({name: tensors[name]}, tmp_path / file)
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    source = open_source(tmp_path)
    assert source.verify() == [] and torch.equal(source.read("a"), tensors["a"])
    (tmp_path / weight_map["t"]).unlink()
    assert "pytorch_model-1.bin is absent" in open_source(tmp_path).verify()[0]


class Bomb:
    def __reduce__(self):
        return os.mkdir, ("exploded",)


@pytest.mark.parametrize("zipped", [True, False])
def test_a_file_that_would_run_code_is_refused(tmp_path, monkeypatch, zipped):
    monkeypatch.chdir(tmp_path)
    torch.save({"a": Bomb()}, tmp_path / "x.bin", _use_new_zipfile_serialization=zipped)
    source = open_source(tmp_path / "x.bin")
    assert "no plain state dict" in source.verify()[0]
    with pytest.raises(WeightError):
        source.names()
    assert not (tmp_path / "exploded").exists()


def test_truncated_and_foreign_files_are_explained(tmp_path, tensors):
    path = tmp_path / "x.pt"
    torch.save(tensors, path)
    os.truncate(path, path.stat().st_size // 2)
    assert "truncated, corrupt" in open_source(path).verify()[0]
    path.write_bytes(b"")
    assert "truncated, corrupt" in open_source(path).verify()[0]
    torch.save([torch.ones(1)], path)
    assert "holds a list" in open_source(path).verify()[0]
    torch.save({"step": 3}, path)
    assert "step is not a tensor" in open_source(path).verify()[0]
