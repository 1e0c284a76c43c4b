"""``phalanx bench serve`` against a server of known timings."""

import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
from xml.etree import ElementTree

import pytest

from tests.bench.serving_stub import Stub

pytest.importorskip("aiohttp", reason="phalanx bench serve needs aiohttp")

SMALL = ["--prompt-len", "3:9", "--output-len", "6", "--seed", 1]


@pytest.fixture
def stub():
    stub = Stub()
    yield stub
    stub.close()


def test_a_closed_loop_finds_the_timings(run, stub, tmp_path):
    flags = ["--concurrency", 4, "--requests", 12, "--api-key", "hush", "--slo", "ttft:5s,tpot:1ms", "--json"]
    flags += ["--save", tmp_path / "run.json", "--picture", tmp_path / "new" / "run.svg", "--ignore-eos"]
    done = run("bench", "serve", "--url", stub.url + "/v1/", *SMALL, *flags)
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["requests"] == {"completed": 12, "failed": 0, "interrupted": 0} and found["errors"] == []
    assert found["model"] == "stub-model" and found["output_tokens"] == 72
    # The first requests of the fourteen are the warm-up's.
    assert len(stub.asked) == 14 and all(body["ignore_eos"] is True for body in stub.asked)
    assert found["prompt_tokens"] == sum(len(body["prompt"]) for body in stub.asked[2:])
    # 50 ms to the first token, then 10 ms each: never less, and on a busy machine more.
    assert 50 <= found["ttft_ms"]["p50"] < 250 and 9 <= found["itl_ms"]["p50"] < 100
    assert 9 <= found["tpot_ms"]["p50"] < 100 and 100 <= found["e2e_ms"]["p50"] < 800
    assert found["output_tok_per_s"] == pytest.approx(72 / found["seconds"], rel=1e-2)
    assert found["goodput"]["share"] == 0
    saved = json.loads((tmp_path / "run.json").read_text())
    rows = saved.pop("per_request")
    assert saved == found and len(rows) == 12 and all(len(row["event_s"]) == 6 for row in rows)
    # Never more than four at once.
    spans = [(row["sent_s"], row["sent_s"] + row["e2e_s"]) for row in rows]
    assert max(sum(a <= begun < b for a, b in spans) for begun, _ in spans) == 4
    ElementTree.fromstring((tmp_path / "new" / "run.svg").read_text())
    assert set(stub.keys) == {"Bearer hush"} and "hush" not in done.stdout


def test_an_open_loop_does_not_wait_for_answers(run, stub):
    stub.first, stub.per_event = 0.4, 3
    flags = ["--rate", 50, "--burstiness", 100, "--requests", 20, "--warm-up", 0, "--endpoint", "chat", "--json"]
    done = run("bench", "serve", "--url", stub.url, *SMALL, *flags)
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    # One by one they would take 8 s; sent every 20 ms, 0.8 s.
    assert found["requests"]["completed"] == 20 and found["seconds"] < 4
    gaps = [b - a for a, b in zip(stub.times, stub.times[1:], strict=False)]
    assert statistics.mean(gaps) == pytest.approx(0.02, rel=0.5)
    # Six tokens in two events, 10 ms apart: 2 ms a token after the first.
    assert found["itl_ms"]["p50"] == pytest.approx(5 * found["tpot_ms"]["p50"], rel=0.1)


def test_a_duration_ends_the_sending(run, stub):
    stub.first = 0.01
    done = run("bench", "serve", "--url", stub.url, *SMALL, "--concurrency", 2, "--duration", 0.5, "--json")
    found = json.loads(done.stdout)
    assert found["requests"]["completed"] >= 2 and 0.4 < found["seconds"] < 3 and found["load"]["requests"] is None


def test_errors_are_counted_and_shown(run, stub):
    stub.statuses = [200, 429, 500, 0, -1, 429]
    flags = ["--concurrency", 1, "--requests", 8, "--warm-up", 1]
    done = run("bench", "serve", "--url", stub.url, *SMALL, *flags, "--slo", "ttft:60s")
    assert done.exit_code == 0, done.output
    assert "3 answers in" in done.stdout and "5 failed" in done.stdout and "37.5%" in done.stdout
    for line in ("2 x HTTP 429: refused with 429", "1 x HTTP 500", "1 x broken off", "error in the stream: the engine"):
        assert line in done.stdout


def test_a_server_that_refuses_everything(run, stub):
    stub.statuses = [401] * 99
    done = run("bench", "serve", "--url", stub.url, *SMALL, "--concurrency", 1)
    assert done.exit_code == 1 and "HTTP 401: refused with 401" in done.stderr
    done = run("bench", "serve", "--url", stub.url, *SMALL, "--concurrency", 1, "--warm-up", 0, "--requests", 3)
    assert done.exit_code == 1 and "3 x HTTP 401" in done.stdout


def test_a_server_that_does_not_count(run, stub):
    stub.counts = False
    done = run("bench", "serve", "--url", stub.url, *SMALL, "--concurrency", 1, "--requests", 2)
    assert done.exit_code == 0 and "does not count tokens" in done.stdout and "TTFT" in done.stdout


def test_a_server_that_is_down(run):
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
        done = run("bench", "serve", "--url", url, "--concurrency", 1)
        assert done.exit_code == 1 and f"{url}/v1/models cannot be read; is the server running?" in done.stderr
        done = run("bench", "serve", "--url", url, "--model", "m", "--concurrency", 1, "--json")
        message = json.loads(done.stdout)["error"]["message"]
        assert done.exit_code == 1 and "warm-up was answered: cannot connect" in message


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--url", "localhost:8000", "--rate", 1], "an address such as"),
        ([], "either --rate"),
        (["--rate", 1, "--concurrency", 1], "either --rate"),
        (["--rate", 0], "--rate 0.0: a number above 0"),
        (["--concurrency", 1, "--burstiness", 2], "give --rate"),
        (["--concurrency", 1, "--endpoint", "embeddings"], "known are completions, chat"),
        (["--concurrency", 1, "--slo", "ttft:1"], "is no objective"),
        (["--concurrency", 1, "--prompt-len", "9:3", "--model", "m"], "is not a range of lengths"),
        (["--concurrency", 1, "--extra", "[]"], "a JSON object"),
        (["--concurrency", 1, "--model", "m", "--dataset", "/nowhere.jsonl"], "nowhere.jsonl"),
        (["--concurrency", 1, "--model", "m", "--dataset", "x", "--text"], "leave --shared-prefix-len and --text out"),
    ],
)
def test_bad_input(run, flags, message):
    done = run("bench", "serve", *flags, "--json")
    assert done.exit_code == 2 and message in json.loads(done.stdout)["error"]["message"]


def test_ctrl_c_reports_what_there_is(stub):
    stub.first = 0.02
    line = [sys.executable, "-m", "phalanx.cli", "bench", "serve", "--url", stub.url, "--concurrency", "2", "--json"]
    process = subprocess.Popen([*line, "--duration", "60", *map(str, SMALL)], stdout=subprocess.PIPE, text=True)
    try:
        until = time.monotonic() + 60
        while len(stub.asked) < 8 and time.monotonic() < until:
            time.sleep(0.02)
        stub.first = 60
        time.sleep(0.3)
        os.kill(process.pid, signal.SIGINT)
        stdout, _ = process.communicate(timeout=30)
    finally:
        process.kill()
        process.wait()
    found = json.loads(stdout)
    assert process.returncode == 130 and found["stopped"]
    assert found["requests"]["completed"] >= 4 and found["requests"]["interrupted"] == 2
    assert found["seconds"] < 30 and found["requests"]["failed"] == 0
