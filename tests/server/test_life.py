"""The life of requests, of the engine and of the server: leaving, limits, faults, ends."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from phalanx.server.run import listen_unix
from tests.server.running import NAME, Server, alive, children, serving, wait_for

pytestmark = pytest.mark.xdist_group("server")
LONG = {"prompt": "hello", "max_tokens": 4000, "ignore_eos": True, "temperature": 0}


class Call(threading.Thread):
    """A request in a thread of its own."""

    def __init__(self, server: Server, path: str = "/v1/completions", **fields: Any) -> None:
        super().__init__(daemon=True)
        self._server, self._path, self._fields = server, path, fields
        self.response: httpx.Response | None = None
        self.seconds = 0.0
        self.start()

    def run(self) -> None:
        began = time.monotonic()
        self.response = self._server.http.post(self._path, json={"model": NAME, **self._fields})
        self.seconds = time.monotonic() - began

    def answer(self, seconds: float = 30) -> httpx.Response:
        """What came back."""
        self.join(seconds)
        assert self.response is not None, "no answer in time"
        return self.response


def running(server: Server) -> bool:
    return server.metric("num_requests_running") > 0


def test_leaving_a_stream_aborts_it(server: Server) -> None:
    before = server.metric("requests_aborted")
    for path, fields in (
        ("/v1/completions", LONG),
        ("/v1/chat/completions", {**LONG, "messages": [{"role": "user", "content": "x"}]}),
    ):
        body = {"model": NAME, **fields, "stream": True}
        if "messages" in body:
            del body["prompt"]
        with server.http.stream("POST", path, json=body) as response:
            # Held: an iterator that is let go closes its response.
            lines = response.iter_lines()
            assert [next(lines) for _ in range(3)]
            wait_for(lambda: running(server))
        server.wait_idle()
    assert server.metric("requests_aborted") == before + 2


def test_leaving_before_the_answer_aborts_it(server: Server) -> None:
    before = server.metric("requests_aborted")
    with pytest.raises(httpx.TimeoutException):
        server.http.post("/v1/completions", json={"model": NAME, **LONG, "n": 2, "temperature": 1}, timeout=0.5)
    server.wait_idle()
    assert server.metric("requests_aborted") == before + 1


@pytest.fixture
def heard_hangup() -> Iterator[None]:
    """Under nohup, where SIGHUP is ignored, a server ignores it too; not here."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("heard_hangup")
def test_limits_of_time_and_of_the_queue(tiny_folder: Path) -> None:
    limits = ["--request-timeout", "1.5", "--max-queue", "1", "--max-num-seqs", "1", "--drain-timeout", "0.3"]
    with serving(tiny_folder, *limits) as server:
        calls = [Call(server, **LONG) for _ in range(2)]
        wait_for(lambda: server.metric("num_requests_waiting") == 1)
        refused = server.complete(prompt="hello", max_tokens=1)
        assert refused.status_code == 429 and int(refused.headers["Retry-After"]) >= 1
        assert refused.json()["error"]["code"] == "queue_full"
        with server.http.stream("POST", "/v1/completions", json={"model": NAME, **LONG, "stream": True}) as response:
            assert response.status_code == 429
        for path, fields in (
            ("/v1/completions", {"prompt": ["a", "b", "c"]}),
            ("/v1/embeddings", {"input": ["a", "b", "c"]}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "n": 3}),
        ):
            never = server.http.post(path, json={"model": NAME, **fields})
            assert never.status_code == 400 and "at most 2 can run and wait" in never.json()["error"]["message"]
        late = [call.answer() for call in calls]
        assert {answer.status_code for answer in late} == {408}
        assert late[0].json()["error"]["code"] == "request_timeout"
        server.wait_idle()
        streamed = server.complete(**LONG, stream=True)
        assert streamed.status_code == 200 and '"code":"request_timeout"' in streamed.text
        assert streamed.text.endswith("data: [DONE]\n\n")
        assert server.complete(prompt="hello", max_tokens=1).status_code == 200
        # What has not ended when the server wants to is told so.
        last = Call(server, **LONG)
        wait_for(lambda: running(server))
        # Its terminal has closed; that it is told so twice does not hurry it.
        for _ in range(2):
            server.process.send_signal(signal.SIGHUP)
        wait_for(lambda: server.http.get("/ready").status_code == 503)
        assert last.answer(10).status_code == 503 and server.process.wait(20) == 0


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks for processes in /proc")
def test_a_killed_engine_answers_everybody_and_comes_again(tiny_folder: Path) -> None:
    with serving(tiny_folder, "--restart") as server:
        calls = [Call(server, **LONG), Call(server, **LONG, stream=True)]
        wait_for(lambda: server.metric("num_requests_running") == 2)
        os.kill(server.engine_pid, signal.SIGKILL)
        began = time.monotonic()
        whole, streamed = (call.answer(5) for call in calls)
        assert time.monotonic() - began < 5
        assert whole.status_code == 503 and "SIGKILL" in whole.json()["error"]["message"]
        assert streamed.status_code == 200 and '"code":"engine_dead"' in streamed.text
        assert server.http.get("/health").status_code == server.http.get("/ready").status_code == 503
        refused = server.complete(prompt="x")
        assert refused.status_code == 503 and "Retry-After" in refused.headers
        wait_for(lambda: server.http.get("/health").status_code == 200, 60)
        assert server.http.get("/ready").status_code == 200
        assert server.complete(prompt="hello", max_tokens=3).status_code == 200
        server.wait_idle()


def test_the_end_is_orderly(tiny_folder: Path, tmp_path: Path) -> None:
    with serving(tiny_folder, log=tmp_path / "log") as server:
        engine = server.engine_pid
        asked = {**LONG, "max_tokens": 700}
        calls = [Call(server, **asked), Call(server, **asked, stream=True)]
        wait_for(lambda: server.metric("num_requests_running") == 2)
        server.process.send_signal(signal.SIGTERM)
        wait_for(lambda: server.http.get("/ready").status_code == 503)
        refused = server.complete(prompt="x")
        assert refused.status_code == 503 and "Retry-After" in refused.headers
        assert server.http.get("/health").status_code == 200
        whole, streamed = (call.answer() for call in calls)
        assert whole.status_code == 200 and whole.json()["usage"]["completion_tokens"] == 700
        assert streamed.text.endswith("data: [DONE]\n\n") and "error" not in streamed.text
        assert server.process.wait(20) == 0 and not alive(engine)
    said = (tmp_path / "log").read_text()
    assert "Traceback" not in said and "leaked" not in said


@pytest.mark.slow
def test_no_process_is_left_when_the_server_is_killed(tiny_folder: Path) -> None:
    with serving(tiny_folder, "--tp", "2") as server:
        engine = server.engine_pid
        processes = [engine, *children(engine)]
        assert len(processes) == 2
        server.process.kill()
        wait_for(lambda: not any(map(alive, processes)))


def template(folder: Path, text: str) -> Path:
    """A chat template in a file."""
    path = folder.parent / f"{folder.name}.jinja"
    path.write_text(text)
    return path


def broken(folder: Path, name: str, text: str) -> Path:
    """The same model with another file."""
    copy = folder.parent / f"{folder.name} {name}"
    shutil.copytree(folder, copy, dirs_exist_ok=True)
    (copy / name).write_text(text)
    return copy


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (lambda folder: [folder, "--num-blocks", "1"], 2, "num_blocks"),
        (lambda folder: [folder, "--tp", "100000"], 2, "tensor_parallel_size"),
        (lambda folder: [folder, "--port", "70000"], 2, "--port is 0 to 65535"),
        (lambda folder: [folder, "--uds", "socket"], 2, "leave --host and --port out"),
        (lambda folder: [folder, "--host", "10.99.99.99"], 1, "cannot listen on 10.99.99.99:0: Cannot assign"),
        (lambda folder: [folder, "--cors-origin", "https://page.example/"], 2, "--cors-origin"),
        (lambda folder: [folder, "--otlp-endpoint", "collector:4318"], 2, "--otlp-endpoint"),
        (lambda folder: [folder, "--served-model-name", ""], 2, "--served-model-name"),
        (lambda folder: [broken(folder, "tokenizer.json", "{}")], 2, "tokenizer of"),
        (lambda folder: ["no-such-model"], 2, "neither a folder"),
        (lambda folder: [folder, "--max-queue", "-1"], 2, "--max-queue"),
        (lambda folder: [folder, "--op", "attention=none-such"], 2, "none-such"),
        (lambda folder: [folder, "--api-key", ""], 2, "API key is empty"),
        (lambda folder: [folder, "--max-prompts", "65537"], 2, "--max-prompts"),
        (lambda folder: [folder, "--max-body-size", "0"], 2, "--max-body-size"),
        (lambda folder: [folder, "--api-key-file", folder], 2, "--api-key-file"),
        (lambda folder: [folder, "--chat-template", folder / "model.safetensors"], 2, "--chat-template"),
        (lambda folder: [folder, "--chat-template", template(folder, "{% if")], 2, "no jinja template"),
    ],
)
def test_what_cannot_start_says_why(
    run: Callable[..., Any], tiny_folder: Path, arguments: Callable[[Any], list[str]], code: int, message: str
) -> None:
    given = arguments(tiny_folder)
    done = run("serve", *given, *(() if "--port" in given else ("--port", 0)))
    assert done.exit_code == code and message in done.stderr and "Traceback" not in done.stderr


def test_a_unix_socket_is_taken_over_from_who_has_ended(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    first = listen_unix(path)
    with pytest.raises(OSError, match="a server runs there"):
        listen_unix(path)
    first.close()
    listen_unix(path).close()
    (tmp_path / "file").touch()
    for other, reason in (
        (tmp_path, "something else is there"),
        (tmp_path / "file", "something else is there"),
        (tmp_path / "none" / "socket", "No such file"),
        (tmp_path / ("x" * 120), "too long"),
    ):
        with pytest.raises(OSError, match=f"cannot listen on the Unix socket .*{reason}"):
            listen_unix(other)
