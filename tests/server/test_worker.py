"""The thread beside the event loop."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading

import pytest

from phalanx.server.worker import Worker


def test_work_is_done_in_order_and_what_nobody_waits_for_is_left() -> None:
    worker, go, done = Worker("test"), threading.Event(), []

    async def scene() -> int:
        first = asyncio.create_task(worker.run(go.wait))
        left = asyncio.create_task(worker.run(lambda: done.append("left")))
        with pytest.raises(ZeroDivisionError):
            last = asyncio.create_task(worker.run(lambda: 1 // 0))
            await asyncio.sleep(0.05)
            left.cancel()
            await asyncio.sleep(0.05)
            go.set()
            await last
        assert await first
        return await worker.run(lambda: 5)

    assert asyncio.run(scene()) == 5 and done == []
    worker.close()


def test_a_process_ends_though_its_work_does_not() -> None:
    program = """
import asyncio, itertools
from phalanx.server.worker import Worker

async def main():
    try:
        await asyncio.wait_for(Worker("test").run(lambda: all(True for _ in itertools.count())), 0.2)
    except TimeoutError:
        print("left")

asyncio.run(main())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=20)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "left", "")
