import json
import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file

from phalanx.weights import SafetensorsSource, WeightError, open_source
from phalanx.weights.safetensors_source import DTYPES


@pytest.fixture
def tensors():
    generator = torch.Generator().manual_seed(0)
    return {
        "a": torch.randn(6, 5, generator=generator),
        "b": torch.randn(4, generator=generator).bfloat16(),
        "scalar": torch.tensor(3.0),
        "empty": torch.zeros(0, 4),
    }


def write_sharded(folder, tensors, files=2):
    """An HF folder whose tensors go round robin into `files` files."""
    names = list(tensors)
    weight_map = {}
    for number in range(files):
        file = f"model-{number + 1:05}-of-{files:05}.safetensors"
        chosen = names[number::files]
        save_file({name: tensors[name] for name in chosen}, folder / file)
        weight_map.update(dict.fromkeys(chosen, file))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return weight_map


def write_raw(path, header, data=b"", length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
    return open_source(path)


@pytest.mark.parametrize("files", [1, 2, 4])
def test_reads_what_was_written(tmp_path, tensors, files):
    if files == 1:
        save_file(tensors, tmp_path / "model.safetensors")
    else:
        write_sharded(tmp_path, tensors, files)
    source = open_source(tmp_path)
    assert source.verify() == []
    assert sorted(source.names()) == sorted(tensors)
    for name, value in tensors.items():
        assert source.info(name) == (tuple(value.shape), value.dtype)
        assert torch.equal(source.read(name), value)
        assert torch.equal(source.read(name, (slice(None),) * value.ndim), value)
    part = source.tensor("a")[1:4, 2:4]
    assert torch.equal(part, tensors["a"][1:4, 2:4])
    assert part.is_contiguous() and part.untyped_storage().nbytes() == part.nbytes


def test_every_dtype_of_the_format_is_known(tmp_path):
    tensors = {name: torch.zeros(3, dtype=dtype) for name, dtype in DTYPES.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    source = open_source(tmp_path)
    assert source.verify() == []
    assert {name: source.read(name).dtype for name in source.names()} == DTYPES


def test_several_files_without_an_index_are_one_checkpoint(tmp_path, tensors):
    write_sharded(tmp_path, tensors)
    (tmp_path / "model.safetensors.index.json").unlink()
    assert sorted(open_source(tmp_path).names()) == sorted(tensors)


def test_an_absent_shard_is_named_before_anything_is_read(tmp_path, tensors):
    weight_map = write_sharded(tmp_path, tensors, 3)
    for file in (weight_map["a"], weight_map["b"]):
        (tmp_path / file).unlink()
    source = open_source(tmp_path)
    problems = source.verify()
    assert len(problems) == 2
    assert all(f"{weight_map[name]} is absent" in text for name, text in zip("ab", problems, strict=True))
    with pytest.raises(WeightError, match="is absent"):
        source.tensor("a")


def test_a_tensor_that_its_file_lacks_is_named(tmp_path, tensors):
    weight_map = write_sharded(tmp_path, tensors)
    save_file({"other": torch.ones(2)}, tmp_path / weight_map["a"])
    source = open_source(tmp_path)
    assert [text for text in source.verify() if "lacks a, which the index" in text]
    with pytest.raises(WeightError, match="lacks a"):
        source.info("a")


def test_a_tensor_in_two_files_is_named(tmp_path, tensors):
    write_sharded(tmp_path, tensors)
    save_file({"a": tensors["a"]}, tmp_path / "model-extra.safetensors")
    (tmp_path / "model.safetensors.index.json").unlink()
    assert ["a is stored in 2 files" in text for text in open_source(tmp_path).verify()] == [True]


def test_a_truncated_file_is_found_without_reading_it(tmp_path, tensors):
    path = tmp_path / "model.safetensors"
    save_file(tensors, path)
    os.truncate(path, path.stat().st_size - 1)
    source = open_source(path)
    assert [text for text in source.verify() if "is truncated" in text]
    with pytest.raises(WeightError, match="truncated"):
        source.names()


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("header", "data", "length", "message"),
    [
        (b"", b"", 1 << 63, "cannot hold a header of 9223372036854775808 bytes"),
        (b"{}", b"", 3, "cannot hold a header"),
        (b"{nonsense", b"", None, "cannot be understood"),
        (b"[1]", b"", None, "cannot be understood"),
        (b"[" * 100_000, b"", None, "cannot be understood"),
        ({"w": 1}, b"", None, "cannot be understood"),
        ({"w": {**ENTRY, "dtype": "F3"}}, b"", None, "w has the unknown dtype 'F3'"),
        ({"w": {**ENTRY, "shape": [-2]}}, b"", None, "offsets and shape of w must be counts"),
        ({"w": {**ENTRY, "shape": [1 << 60, 1 << 60]}}, bytes(8), None, "needs"),
        ({"w": ENTRY}, bytes(7), None, "truncated"),
        ({"w": ENTRY}, bytes(9), None, "no tensor owns its last 1 bytes"),
        ({"w": {**ENTRY, "data_offsets": [8, 16]}}, bytes(16), None, "no tensor owns the 8 bytes before w"),
        ({"w": {**ENTRY, "data_offsets": [8, 0]}}, bytes(8), None, "needs 8 bytes, its span has -8"),
        ({"w": ENTRY, "v": {**ENTRY, "data_offsets": [4, 12]}}, bytes(12), None, "v overlaps the tensor before it"),
        (b'{"w":%b,"w":%b}' % ((json.dumps(ENTRY).encode(),) * 2), bytes(8), None, "names 'w' twice"),
    ],
)
def test_corrupt_headers_are_explained(tmp_path, header, data, length, message):
    source = write_raw(tmp_path / "w.safetensors", header, data, length)
    assert message in "\n".join(source.verify())


def test_a_tiny_file_is_corrupt(tmp_path):
    (tmp_path / "w.safetensors").write_bytes(b"abc")
    assert "3 bytes cannot hold" in open_source(tmp_path).verify()[0]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"w": "../w.safetensors"}}'])
def test_an_unusable_index_is_refused(tmp_path, text):
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(WeightError, match=r"model\.safetensors\.index\.json"):
        open_source(tmp_path)


def test_an_unknown_name_is_answered_with_near_ones(tmp_path, tensors):
    save_file({"model.norm.weight": torch.ones(1)}, tmp_path / "model.safetensors")
    with pytest.raises(WeightError, match=r"'model\.norm\.weigth'; the nearest names are model\.norm\.weight"):
        open_source(tmp_path).tensor("model.norm.weigth")


def test_a_file_that_goes_away_is_an_error_of_weights(tmp_path, tensors):
    save_file(tensors, tmp_path / "model.safetensors")
    source = open_source(tmp_path)
    source.names()
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(WeightError, match="cannot read a from"):
        source.read("a")


def sparse_checkpoint(path, tensors, rows, width):
    """A file of zeros that takes no space on disk: float32 [rows, width] each."""
    size = rows * width * 4
    header = {
        f"w{i}": {"dtype": "F32", "shape": [rows, width], "data_offsets": [i * size, (i + 1) * size]}
        for i in range(tensors)
    }
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    os.truncate(path, 8 + len(text) + tensors * size)


linux = pytest.mark.skipif(sys.platform != "linux", reason="peak resident memory is measured as Linux counts it")

READER = """
import resource, sys
from pathlib import Path
from phalanx.weights import open_source
from phalanx.layout import Partition, shard
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
source = open_source(Path(sys.argv[1]))
assert source.verify() == []
start = peak()
partition = Partition.column() if sys.argv[2] == "shard" else None
if partition:
    kept = [shard(source.tensor(name), partition, 1, 2) for name in source.names()]
else:
    kept = [source.tensor(name)[100:101] for name in source.names()]
print(peak() - start)
"""


def peak_growth(path, what):
    """MiB by which the peak resident memory of a process grows while it reads."""
    done = subprocess.run([sys.executable, "-c", READER, path, what], capture_output=True, text=True, check=True)
    return int(done.stdout)


@pytest.fixture
def readable_from_child(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))


@linux
def test_a_slice_reads_only_its_bytes(tmp_path, readable_from_child):
    path = tmp_path / "model.safetensors"
    sparse_checkpoint(path, tensors=4, rows=1 << 16, width=1 << 10)  # 1 GiB
    assert peak_growth(path, "rows") < 32


@linux
@pytest.mark.slow
def test_a_rank_that_reads_its_half_of_4_gib_stays_near_its_shard(tmp_path, readable_from_child):
    path = tmp_path / "model.safetensors"
    sparse_checkpoint(path, tensors=16, rows=1 << 16, width=1 << 10)  # 16 tensors of 256 MiB
    assert peak_growth(path, "shard") < 2048 + 256 + 200


def test_one_class_for_files_given_by_name(tmp_path, tensors):
    save_file(tensors, tmp_path / "x.safetensors")
    assert sorted(SafetensorsSource(tmp_path, ["x.safetensors"]).names()) == sorted(tensors)
