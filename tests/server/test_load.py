"""Under load, with clients that leave as they like: no error, no leak, and an orderly end."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from pathlib import Path

import pytest

from tests.server.load import load
from tests.server.running import Server, alive, serving

pytestmark = pytest.mark.xdist_group("server")
ALLOWED = {"200", "400", "408", "429", "left early", "left before the body"}


def memory(pid: int) -> float:
    """Resident memory of a process in MB."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) / 1024


def run(server: Server, clients: int, seconds: float, seed: int) -> dict[str, int]:
    host, port = server.url.removeprefix("http://").split(":")
    return dict(asyncio.run(load(host, int(port), clients, seconds, seed)))


def test_a_few_clients_leave_nothing_behind(server: Server) -> None:
    counts = run(server, clients=10, seconds=2, seed=1)
    assert set(counts) <= ALLOWED and counts["200"] > 0, counts
    server.wait_idle()


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc").is_dir(), reason="reads memory from /proc")
def test_two_hundred_clients_for_a_minute(tiny_folder: Path, tmp_path: Path) -> None:
    with serving(tiny_folder, "--max-queue", "120", "--request-timeout", "5", log=tmp_path / "log") as server:
        engine = server.engine_pid
        run(server, clients=200, seconds=30, seed=1)
        samples: list[tuple[float, float, float]] = []
        done = threading.Event()

        def watch() -> None:
            while not done.wait(1):
                samples.append((time.monotonic(), memory(server.process.pid), memory(engine)))

        watcher = threading.Thread(target=watch)
        watcher.start()
        counts = run(server, clients=200, seconds=60, seed=1000)
        done.set()
        watcher.join()
        slopes = [60 * slope([(row[0], row[place]) for row in samples]) for place in (1, 2)]
        print(counts, "MB/min:", slopes, "MB:", samples[-1][1:])
        assert set(counts) <= ALLOWED and counts["200"] > 100, counts
        server.wait_idle()
        assert all(found < 5 for found in slopes), slopes
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(20) == 0 and not alive(engine)
    assert "Traceback" not in (tmp_path / "log").read_text()


def slope(points: list[tuple[float, float]]) -> float:
    """Of the line of least squares."""
    middle_x, middle_y = (sum(point[axis] for point in points) / len(points) for axis in (0, 1))
    over = sum((x - middle_x) * (y - middle_y) for x, y in points)
    return over / sum((x - middle_x) ** 2 for x, _ in points)
