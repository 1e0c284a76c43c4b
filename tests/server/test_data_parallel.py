"""Two engines behind one port."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import pytest

from tests.server.running import Server, alive, serving, wait_for
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
        engines = server.engine_pids
        assert len(engines) == 2 and of_engines(server, "up") == [1, 1]
        # Prompts that begin alike go where their beginning is cached; others are spread.
        beginning = [[7 + seed] * 64 for seed in range(4)]
        for more in range(3):
            for start in beginning:
                assert server.complete(prompt=[[*start, 80 + more]], max_tokens=1).status_code == 200
        wait_for(lambda: server.metric("prefix_cache_hits") == 4 * 2 * 64)
        assert server.metric("generation_tokens") == 12
        # One is killed: what ran on it is told so, what ran on the other goes on.
        asked = {**LONG, "max_tokens": 2500}
        calls = [Call(server, **{**asked, "prompt": f"{place} hello"}) for place in range(2)]
        calls += [Call(server, **{**asked, "prompt": f"{place} hello", "stream": True}) for place in range(2)]
        wait_for(lambda: of_engines(server, "requests_running") == [2, 2])
        assert server.metric("num_requests_running") == 4
        os.kill(engines[0], signal.SIGKILL)
        began = time.monotonic()
        wait_for(lambda: server.http.get("/health").json().get("live") == 1, 5)
        assert server.http.get("/ready").status_code == 200
        assert server.complete(prompt="hello", max_tokens=3).status_code == 200
        wait_for(lambda: sum(not call.is_alive() for call in calls) >= 2, 5 - (time.monotonic() - began))
        texts = [call.answer().text for call in calls]
        assert sum("SIGKILL" in text and '"code":"engine_dead"' in text for text in texts) == 2
        codes = [call.answer().status_code for call in calls]
        assert [code for code, text in zip(codes, texts, strict=True) if "SIGKILL" not in text] == [200, 200]
        # Without the other one there is none, until one is back; counters have not fallen.
        os.kill(engines[1], signal.SIGKILL)
        wait_for(lambda: server.http.get("/health").status_code == 503 or 1 in of_engines(server, "restarts"))
        wait_for(lambda: of_engines(server, "restarts") == [1, 1], 60)
        assert server.http.get("/health").json()["live"] == 2
        assert server.complete(prompt="hello", max_tokens=3).status_code == 200
        assert server.metric("generation_tokens") >= 12 + 2 * 2500
        server.wait_idle()
        engines = server.engine_pids
        server.process.kill()
        wait_for(lambda: not any(map(alive, engines)))


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
