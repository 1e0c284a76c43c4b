import json

import pytest

from tests.cli.conftest import ENGINE

SMALL = ["--requests", 3, "--prompt-len", "4:20", "--output-len", "2:6", "--warm-up", 1]


def test_throughput_beside_transformers(run, tiny_folder, tmp_path):
    file = tmp_path / "results" / "run.json"
    flags = ["--peer", "transformers", "--peer-mode", "padded", "--peer-mode", "single", "--save", file, "--repeat", 2]
    done = run("bench", "throughput", tiny_folder, *SMALL, *flags, "--json", *ENGINE)
    assert done.exit_code == 0, done.stderr
    assert "transformers padded: begins" in done.stderr and "Loading weights" not in done.stderr
    found = json.loads(done.stdout)
    assert found == json.loads(file.read_text())
    ours, padded, single = found["results"]
    assert (ours["engine"], padded["mode"], single["mode"]) == ("phalanx", "padded", "single")
    assert padded["identical_answers"] == single["identical_answers"] == 3
    assert ours["settings"]["prefix_cache"] is False and ours["settings"]["max_model_len"] == 26
    assert len(ours["wall_s"]) == 2 and ours["output_tok_per_s"] > 0 and ours["output_tok_per_core_s"] > 0
    best = max(padded, single, key=lambda result: result["output_tok_per_s"])
    assert found["best_peer"] == f"transformers {best['mode']}"
    assert found["ratio"]["output_tok_per_s"] == pytest.approx(
        ours["output_tok_per_s"] / best["output_tok_per_s"], rel=1e-2
    )
    assert found["workload"]["requests"] == 3 and found["dtype"] == "float32"


def test_latency_for_people(run, tiny_folder):
    done = run("bench", "latency", tiny_folder, *SMALL, *ENGINE)
    assert done.exit_code == 0, done.stderr
    assert "latency of" in done.stdout and "3 prompts" in done.stdout and "phalanx" in done.stdout


def test_a_peer_that_fails_leaves_the_other_figures(run, tiny_folder, tmp_path):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexit 3\n")
    python.chmod(0o755)
    flags = ["--peer", "vllm", "--peer-mode", "eager", "--peer-python", python]
    done = run("bench", "throughput", tiny_folder, *SMALL, *flags, "--json", *ENGINE)
    ours, theirs = json.loads(done.stdout)["results"]
    assert done.exit_code == 0 and ours["output_tok_per_s"] > 0 and "ended with status 3" in theirs["error"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--peer", "llama"], "known are transformers, vllm"),
        (["--peer", "vllm"], "needs --peer-python"),
        (["--peer", "transformers", "--tp", "2"], "on one rank"),
        (["--peer", "transformers", "--peer-mode", "eager"], "modes are padded, continuous, single"),
        (["--prompt-len", "9:3"], "is not a range of lengths"),
    ],
)
def test_bad_input(run, tiny_folder, flags, message):
    done = run("bench", "throughput", tiny_folder, *flags, "--json")
    assert done.exit_code == 2 and message in json.loads(done.stdout)["error"]["message"]
