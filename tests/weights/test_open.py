import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError, OfflineModeIsEnabled
from safetensors.torch import save_file

from phalanx.weights import MemorySource, WeightError, hub, open_source
from phalanx.weights.hub import snapshot


def save(folder, name="model.safetensors", **tensors):
    folder.mkdir(exist_ok=True)
    save_file(tensors or {"w": torch.ones(1)}, folder / name)
    return folder


def test_a_source_is_handed_through():
    source = MemorySource({})
    assert open_source(source) is source


def test_the_single_file_wins_and_safetensors_win_over_bin(tmp_path):
    save(tmp_path, a=torch.ones(1))
    save(tmp_path, "other.safetensors", b=torch.ones(1))
    torch.save({"c": torch.ones(1)}, tmp_path / "pytorch_model.bin")
    assert open_source(str(tmp_path)).names() == ["a"]
    assert open_source(tmp_path / "pytorch_model.bin").names() == ["c"]


def test_what_holds_no_weights_is_refused(tmp_path):
    with pytest.raises(WeightError, match="holds no weights"):
        open_source(tmp_path)
    (tmp_path / "notes.txt").touch()
    with pytest.raises(WeightError, match="its suffix must be"):
        open_source(tmp_path / "notes.txt")
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).touch()
    with pytest.raises(WeightError, match=r"2 GGUF files \(a\.gguf, b\.gguf\)"):
        open_source(tmp_path)
    with pytest.raises(WeightError, match="no folder or file"):
        open_source(tmp_path / "absent")
    with pytest.raises(TypeError, match="cannot read weights from a int"):
        open_source(3)


@pytest.fixture
def fake_hub(monkeypatch):
    """Replaces snapshot_download; the answers are a list of folders or errors, one a call."""
    calls, answers = [], []

    def download(repo_id, **options):
        calls.append(options)
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return str(answer)

    monkeypatch.setattr(hub, "snapshot_download", download)
    return calls, answers


def test_a_complete_cached_repository_needs_no_network(tmp_path, fake_hub):
    calls, answers = fake_hub
    answers.append(save(tmp_path))
    assert open_source("owner/name", revision="v1").names() == ["w"]
    assert calls == [{"revision": "v1", "local_files_only": True}]


def test_weights_are_fetched_by_preferred_format(tmp_path, fake_hub):
    calls, answers = fake_hub
    (tmp_path / "config").mkdir()
    answers += [LocalEntryNotFoundError("x"), tmp_path / "config", save(tmp_path / "bin")]
    lines: list[str] = []
    assert snapshot("owner/name", progress=lines.append) == tmp_path / "bin"
    assert lines == ["downloading owner/name from the Hugging Face hub", f"downloaded to {tmp_path / 'bin'}"]
    assert "*.safetensors" in calls[1]["allow_patterns"] and "*.bin" in calls[2]["allow_patterns"]


def test_offline_and_absent_is_explained(tmp_path, fake_hub):
    _, answers = fake_hub
    answers += [tmp_path, OfflineModeIsEnabled("offline")]  # the cache has the config only
    with pytest.raises(
        WeightError, match=r"'owner/name': there is no folder of that name .* neither complete in the cache"
    ):
        open_source("owner/name")


def test_a_repository_without_weights_is_explained(tmp_path, fake_hub):
    _, answers = fake_hub
    answers += [LocalEntryNotFoundError("x"), *[tmp_path] * 3]
    with pytest.raises(WeightError, match="holds no weights"):
        open_source("owner/name")
