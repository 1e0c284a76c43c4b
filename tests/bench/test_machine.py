import subprocess

import torch

from phalanx.bench.machine import command, machine


def test_what_is_needed_to_run_it_again(monkeypatch):
    found = machine()
    assert found["torch"] == torch.__version__ and found["threads"] == torch.get_num_threads() and found["cores"] >= 1
    assert found["cpu"] and len(found["load_average"]) == 3
    monkeypatch.setattr("sys.argv", ["/venv/bin/phalanx", "bench", "throughput", "a model"])
    assert command() == "phalanx bench throughput 'a model'"


def test_outside_of_a_checkout_there_is_no_commit(monkeypatch):
    def absent(*arguments, **settings):
        raise subprocess.CalledProcessError(128, "git")

    monkeypatch.setattr(subprocess, "run", absent)
    assert machine()["commit"] is None
