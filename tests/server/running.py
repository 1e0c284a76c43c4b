"""``phalanx serve`` in a process, for tests."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2 as httpx
import openai

FLAGS = ["--num-blocks", "1200", "--block-size", "8", "--max-num-seqs", "8", "--max-model-len", "4096"]
NAME = "tiny"


class Server:
    """A server that runs."""

    def __init__(self, process: subprocess.Popen[str], url: str, key: str | None = None) -> None:
        self.process = process
        self.url = url
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        self.http = httpx.Client(base_url=url, timeout=60, headers=headers)

    def client(self, **options: Any) -> openai.OpenAI:
        """OpenAI's own."""
        return openai.OpenAI(**{"base_url": f"{self.url}/v1", "api_key": "none", "max_retries": 0, **options})

    def complete(self, **fields: Any) -> httpx.Response:
        """One request to /v1/completions."""
        return self.http.post("/v1/completions", json={"model": NAME, **fields})

    def chat(self, **fields: Any) -> httpx.Response:
        """One request to /v1/chat/completions."""
        return self.http.post("/v1/chat/completions", json={"model": NAME, **fields})

    def metric(self, name: str) -> float:
        """A series without further labels."""
        for line in self.http.get("/metrics").text.splitlines():
            if line.startswith((f"phalanx:{name}{{", f"phalanx:{name}_total{{")):
                return float(line.rpartition(" ")[2])
        raise AssertionError(f"there is no series {name}")

    def wait_idle(self, seconds: float = 10) -> None:
        """Until no block is in use and nothing runs."""
        wait_for(lambda: self.metric("kv_cache_usage_perc") == 0 == self.metric("num_requests_running"), seconds)

    @property
    def engine_pid(self) -> int:
        """The engine's process."""
        (pid,) = self.engine_pids
        return pid

    @property
    def engine_pids(self) -> list[int]:
        """Those of all engines."""
        return [
            child
            for child in children(self.process.pid)
            if b"engine_process" in Path(f"/proc/{child}/cmdline").read_bytes()
        ]


@contextmanager
def serving(model: Path, *flags: str, key: str | None = None, log: Path | None = None) -> Iterator[Server]:
    """A server of this model, ended in the end."""
    command = [sys.executable, "-m", "phalanx.cli", "serve", str(model), "--json", "--port", "0"]
    command += ["--served-model-name", NAME, *FLAGS, *flags]
    errors = log.open("w") if log is not None else None
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        yield Server(process, json.loads(line)["ready"], key)
    finally:
        process.terminate()
        try:
            process.wait(40)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if errors is not None:
            errors.close()


def children(pid: int) -> list[int]:
    """Processes that a process has started."""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        found += [int(text) for text in (task / "children").read_text().split()]
    return found


def alive(pid: int) -> bool:
    """Whether a process runs."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_for(condition: Any, seconds: float = 10) -> None:
    """Fails if the condition does not come true in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come true in time"
        time.sleep(0.05)


def events(response: httpx.Response) -> list[Any]:
    """The JSON of all events of a stream that has ended well."""
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]
