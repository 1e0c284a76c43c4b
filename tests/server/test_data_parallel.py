"""Two engines behind one port."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from tests.server.running import Server, serving, wait_for
from tests.server.test_life import LONG, Call

pytestmark = [
    pytest.mark.xdist_group("server two"),
    pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks for processes in /proc"),
]


def of_engines(server: Server, name: str) -> list[float]:
    """A series of each engine."""
    text = server.http.get("/metrics").text
    found = re.findall(rf'^phalanx:engine_{name}(?:_total)?{{engine="(\d)".*}} (\S+)$', text, re.MULTILINE)
    return [float(value) for _, value in sorted(found)]


def test_two_engines(tiny_folder: Path) -> None:
    with serving(tiny_folder, "--data-parallel", "2", "--restart") as server:
        assert server.http.get("/health").json() == {"status": "ok", "engines": 2, "live": 2}
        assert len(server.engine_pids) == 2 and of_engines(server, "up") == [1, 1]
        # Prompts that begin alike go where their beginning is cached; others are spread.
        beginning = [[7 + seed] * 64 for seed in range(4)]
        for more in range(3):
            for start in beginning:
                assert server.complete(prompt=[[*start, 80 + more]], max_tokens=1).status_code == 200
        wait_for(lambda: server.metric("prefix_cache_hits") == 4 * 2 * 64)
        assert server.metric("generation_tokens") == 12
        # One is killed: what ran on it is told so, what ran on the other goes on.
        calls = [Call(server, **{**LONG, "prompt": f"hello {place}", "max_tokens": 2500}) for place in range(2)]
        wait_for(lambda: of_engines(server, "requests_running") == [1, 1])
        assert server.metric("num_requests_running") == 2
        os.kill(server.engine_pids[0], signal.SIGKILL)
        wait_for(lambda: server.http.get("/health").json().get("live") == 1)
        assert server.http.get("/ready").status_code == 200
        assert server.complete(prompt="hello", max_tokens=3).status_code == 200
        answers = sorted((call.answer() for call in calls), key=lambda answer: answer.status_code)
        assert [answer.status_code for answer in answers] == [200, 503]
        assert answers[0].json()["usage"]["completion_tokens"] == 2500
        assert "SIGKILL" in answers[1].json()["error"]["message"]
        # It alone is started again, and counters have not fallen.
        wait_for(lambda: of_engines(server, "up") == [1, 1], 60)
        assert sorted(of_engines(server, "restarts")) == [0, 1]
        assert server.metric("generation_tokens") >= 12 + 2500
        assert server.http.get("/health").json()["live"] == 2
        server.wait_idle()


@pytest.mark.slow
def test_without_any_engine_health_fails_until_one_is_back(tiny_folder: Path) -> None:
    with serving(tiny_folder, "--data-parallel", "2", "--restart") as server:
        for pid in server.engine_pids:
            os.kill(pid, signal.SIGKILL)
        wait_for(lambda: server.http.get("/health").status_code == 503)
        refused = server.complete(prompt="x")
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "engine_dead"
        wait_for(lambda: of_engines(server, "up") == [1, 1], 60)
        assert server.complete(prompt="hello", max_tokens=3).status_code == 200
        server.wait_idle()
