from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

SCRIPT = """
import json, os, sys, time
from pathlib import Path
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "OMP_NUM_THREADS")
folder = Path(__file__).parent
place = {name: os.environ[name] for name in names}
(folder / f"rank{place['RANK']}.json").write_text(json.dumps([place, sys.argv[1:]]))
if sys.argv[-1] == "wait":
    time.sleep(60)
if sys.argv[-1] == "fail" and place["RANK"] == "1":
    sys.exit(7)
if sys.argv[-1] == "kill" and place["RANK"] == "1":
    os.kill(os.getpid(), 9)
"""


@pytest.fixture
def script(tmp_path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def start(*arguments: object) -> subprocess.Popen[str]:
    env = {name: value for name, value in os.environ.items() if name not in ("OMP_NUM_THREADS", "RANK", "LOCAL_RANK")}
    command = [sys.executable, "-m", "phalanx.cli", "launch", *map(str, arguments)]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def seen(script: Path) -> list[list]:
    import json

    return [json.loads(path.read_text()) for path in sorted(script.parent.glob("rank*.json"))]


def test_ranks_get_their_place_and_all_arguments(script):
    # Options after the script are the script's own, even those that launch has too; a $ stays one.
    own = ["--nproc", "9", "--local_rankk=x", "$HOME ${local_rank} $$", "a b"]
    ran = start("--num_gpus", 2, script, *own)
    assert ran.wait(60) == 0, ran.stderr.read()
    for rank, (place, arguments) in enumerate(seen(script)):
        assert arguments == [f"--local_rank={rank}", *own]
        assert (place["RANK"], place["LOCAL_RANK"], place["WORLD_SIZE"]) == (str(rank), str(rank), "2")
        assert place["MASTER_ADDR"] == "127.0.0.1" and int(place["OMP_NUM_THREADS"]) >= 1
    assert len(seen(script)) == 2


def test_no_local_rank(script):
    ran = start("--nproc", 1, "--no-local-rank", script, "x")
    assert ran.wait(60) == 0, ran.stderr.read()
    assert seen(script)[0][1] == ["x"]


@pytest.mark.parametrize(
    ("how", "code", "told"), [("fail", 7, "ended with exit code 7"), ("kill", 137, "killed by SIGKILL")]
)
def test_the_exit_code_is_the_rank_s(script, how, code, told):
    ran = start("--nproc", 2, script, how)
    assert ran.wait(60) == code
    # Nothing of torch's own beside it.
    assert ran.stderr.read() == f"rank 1 {'was ' if how == 'kill' else ''}{told}\n"


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_all_ranks(script, sent):
    ran = start("--nproc", 2, script, "wait")
    deadline = time.monotonic() + 40
    while len(seen(script)) < 2 and time.monotonic() < deadline:
        time.sleep(0.1)
    ran.send_signal(sent)
    assert ran.wait(40) == 128 + sent and "elastic" not in ran.stderr.read()


def test_what_cannot_be_started(run):
    done = run("launch", "--nproc", "2", "nowhere.py")
    assert done.exit_code == 2 and "no file 'nowhere.py'" in done.stderr
    assert run("launch", "--nproc", "0", "nowhere.py").exit_code == 2
