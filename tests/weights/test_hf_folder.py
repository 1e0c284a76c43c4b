import json

import pytest
import torch

from phalanx.weights import WeightError, open_source, write_hf_folder


def pairs(count=4):
    return [(f"w{i}", torch.full((10, 10), float(i))) for i in range(count)]


def test_one_file_needs_no_index(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    folder = write_hf_folder(tmp_path / "m", pairs(), {"model_type": "x"}, extra_files=[tmp_path / "tokenizer.json"])
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert json.loads((folder / "config.json").read_text()) == {"model_type": "x"}
    assert torch.equal(open_source(folder).read("w3"), torch.full((10, 10), 3.0))


def test_shards_are_no_larger_than_asked(tmp_path):
    big = ("big", torch.zeros(1000))
    folder = write_hf_folder(tmp_path / "m", [*pairs(), big], {}, max_shard_bytes=800)
    files = sorted(path.name for path in folder.glob("*.safetensors"))
    assert files == [f"model-{i:05}-of-00003.safetensors" for i in (1, 2, 3)]
    source = open_source(folder)
    assert source.verify() == [] and sorted(source.names()) == ["big", "w0", "w1", "w2", "w3"]
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 4 * 400 + 4000


def test_tensors_are_streamed(tmp_path):
    class Held(torch.Tensor):
        alive = 0

        def __del__(self):
            Held.alive -= 1

    def stream():
        for i in range(10):
            Held.alive += 1
            yield f"w{i}", torch.ones(100).as_subclass(Held)
            assert Held.alive <= 3

    write_hf_folder(tmp_path / "m", stream(), {}, max_shard_bytes=400)


def test_views_and_tied_tensors_are_written_whole(tmp_path):
    base = torch.arange(12.0).reshape(3, 4)
    given = {"a": base, "tied": base, "t": base.t(), "part": base[1:]}
    source = open_source(write_hf_folder(tmp_path / "m", given.items(), {}))
    assert all(torch.equal(source.read(name), value) for name, value in given.items())


def test_nothing_is_left_behind_after_a_failure(tmp_path):
    def failing():
        yield "w", torch.ones(1)
        raise RuntimeError("disk")

    with pytest.raises(RuntimeError, match="disk"):
        write_hf_folder(tmp_path / "m", failing(), {})
    with pytest.raises(WeightError, match="give 'w0' twice"):
        write_hf_folder(tmp_path / "m", pairs(1) * 2, {})
    assert list(tmp_path.iterdir()) == []


def test_a_folder_with_content_is_replaced_only_on_demand(tmp_path):
    folder = write_hf_folder(tmp_path / "m", pairs(1), {})
    (folder / "stale").touch()
    with pytest.raises(FileExistsError, match="overwrite=True"):
        write_hf_folder(folder, pairs(2), {})
    write_hf_folder(folder, pairs(2), {}, overwrite=True)
    assert sorted(open_source(folder).names()) == ["w0", "w1"]
    assert not (folder / "stale").exists() and list(tmp_path.iterdir()) == [folder]
