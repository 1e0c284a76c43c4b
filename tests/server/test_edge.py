"""What every request passes: keys, origins, sizes, ids, the log."""

from __future__ import annotations

import io
import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import httpx2 as httpx
import openai
import pytest

from phalanx.server.edge import RequestRecord
from phalanx.server.request_log import RequestLog
from phalanx.server.settings import ServerSettings
from tests.server.running import NAME, Server, serving, wait_for

pytestmark = pytest.mark.xdist_group("server")
ORIGIN = "https://page.example"


@pytest.fixture(scope="module")
def guarded(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Path]]:
    """A server with keys, an origin, a small limit of bodies, and a JSON log."""
    folder = tmp_path_factory.mktemp("guarded")
    (folder / "keys").write_text("second\n\nthird\nключ\n", encoding="utf-8")
    flags = ["--api-key", "first", "--api-key-file", str(folder / "keys"), "--cors-origin", ORIGIN]
    flags += ["--max-body-size", "10k", "--log-format", "json", "--log-prompts"]
    with serving(tiny_folder, *flags, key="first", log=folder / "log") as server:
        yield server, folder / "log"


def test_a_key_is_asked_for(guarded: tuple[Server, Path]) -> None:
    server, _ = guarded
    with httpx.Client(base_url=server.url) as stranger:
        for path in ("/v1/models", "/metrics", "/openapi.json", "/none", "/version"):
            for headers in ({}, {"Authorization": "Bearer firs"}, {"Authorization": "Basic first"}):
                answer = stranger.get(path, headers=headers)
                assert answer.status_code == 401 and answer.json()["error"]["code"] == "invalid_api_key"
        assert [stranger.get(path).status_code for path in ("/health", "/ready", "/")] == [200] * 3
    for key in ("first", "second", "third"):
        assert server.client(api_key=key).models.list().data[0].id == NAME
    with httpx.Client(base_url=server.url) as known:
        headers = [(b"Authorization", "Bearer ключ".encode())]
        assert known.get("/v1/models", headers=headers).status_code == 200
    with pytest.raises(openai.AuthenticationError):
        server.client(api_key="fourth").models.list()


def test_other_origins_may_not_call(guarded: tuple[Server, Path], server: Server) -> None:
    ask = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    allowed = guarded[0].http.options("/v1/completions", headers={"Origin": ORIGIN, **ask})
    assert allowed.status_code == 200 and allowed.headers["Access-Control-Allow-Origin"] == ORIGIN
    other = guarded[0].http.get("/v1/models", headers={"Origin": "https://other.example"})
    assert "Access-Control-Allow-Origin" not in other.headers
    assert "Access-Control-Allow-Origin" not in server.http.get("/v1/models", headers={"Origin": ORIGIN}).headers


def test_long_bodies_are_not_read(guarded: tuple[Server, Path]) -> None:
    server, _ = guarded
    body = json.dumps({"model": NAME, "prompt": "x" * 10_000}).encode()
    answer = server.http.post("/v1/completions", content=body)
    assert answer.status_code == 413 and "10000 bytes" in answer.json()["error"]["message"]
    chunked = server.http.post("/v1/completions", content=iter([body[:5000], body[5000:]]))
    assert chunked.status_code == 413
    # Without an end in sight, the answer comes as soon as it is too much.
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer first\r\n")
        connection.sendall(b"Transfer-Encoding: chunked\r\n\r\n2ee0\r\n" + b"x" * 12_000 + b"\r\n")
        assert b"413" in connection.recv(1000)


def test_ids_come_back_if_they_are_fit(guarded: tuple[Server, Path]) -> None:
    server, _ = guarded
    assert server.http.get("/version", headers={"X-Request-Id": "my-id.7"}).headers["X-Request-Id"] == "my-id.7"
    made = set()
    for given in ("a b", "x" * 129, "<script>", ""):
        answer = server.http.get("/version", headers={"X-Request-Id": given})
        made.add(answer.headers["X-Request-Id"])
    assert len(made) == 4 and all(name.startswith("req-") for name in made)
    failed = server.http.get("/none", headers={"X-Request-Id": "mine"})
    assert failed.headers["X-Request-Id"] == "mine"
    body = {"model": NAME, "prompt": "x", "max_tokens": 1}
    answer = server.http.post("/v1/completions", json=body, headers={"X-Request-Id": "mine"})
    assert answer.json()["id"] == "cmpl-mine"


def test_a_request_is_a_line_in_the_log(guarded: tuple[Server, Path]) -> None:
    server, log = guarded
    fields = {"prompt": "secret\n", "max_tokens": 3, "user": "u1", "ignore_eos": True, "temperature": 0}
    answer = server.http.post("/v1/completions", json={"model": NAME, **fields}, headers={"X-Request-Id": "logged"})
    wait_for(lambda: '"logged"' in log.read_text())
    lines = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]
    line = next(line for line in lines if line["request_id"] == "logged")
    assert (line["method"], line["path"], line["status"]) == ("POST", "/v1/completions", 200)
    assert (line["prompt_tokens"], line["completion_tokens"], line["user"]) == (7, 3, "u1")
    assert line["finish_reasons"] == ["length"] and line["prompts"] == ["secret\n"]
    assert line["answers"] == [answer.json()["choices"][0]["text"]]
    assert 0 <= line["queue_seconds"] <= line["first_token_seconds"] <= line["seconds"]


def test_a_client_that_left_is_no_fault_of_ours(guarded: tuple[Server, Path]) -> None:
    server, log = guarded
    body = {"model": NAME, "prompt": "x", "max_tokens": 4000, "ignore_eos": True}
    with pytest.raises(httpx.TimeoutException):
        server.http.post("/v1/completions", json=body, headers={"X-Request-Id": "left"}, timeout=0.3)
    wait_for(lambda: '"left"' in log.read_text())
    (line,) = (line for line in log.read_text().splitlines() if '"left"' in line)
    assert json.loads(line)["status"] == 499
    streamed = server.http.stream(
        "POST", "/v1/completions", json=body | {"stream": True}, headers={"X-Request-Id": "left-later"}
    )
    with streamed as answer:
        next(answer.iter_lines())
    wait_for(lambda: '"left-later"' in log.read_text())
    (line,) = (line for line in log.read_text().splitlines() if '"left-later"' in line)
    assert json.loads(line)["status"] == 200 and "Traceback" not in log.read_text()


def test_metrics_have_the_names_that_dashboards_know(server: Server) -> None:
    before = {name: server.metric(name) for name in ("prompt_tokens", "generation_tokens")}
    server.complete(prompt=[[5, 6, 7]] * 2, max_tokens=4, ignore_eos=True)
    server.complete(prompt=[5, 6, 7], max_tokens=4, ignore_eos=True, stream=True)
    server.wait_idle()
    assert server.metric("prompt_tokens") - before["prompt_tokens"] == 9
    assert server.metric("generation_tokens") - before["generation_tokens"] == 12
    text = server.http.get("/metrics").text
    for name in (
        *("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "prefix_cache_queries_total"),
        *("prefix_cache_hits_total", "num_preemptions_total", "requests_aborted_total"),
        *("time_to_first_token_seconds_count", "inter_token_latency_seconds_sum", "e2e_request_latency_seconds_bucket"),
        "request_queue_time_seconds_count",
    ):
        assert f"\nphalanx:{name}{{" in text, name
    assert 'finished_reason="length"' in text


def test_the_page_runs_its_own_script_only(server: Server) -> None:
    answer = server.http.get("/")
    assert answer.headers["Content-Type"].startswith("text/html")
    policy = answer.headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy and "script-src 'sha256-" in policy and "unsafe" not in policy


def test_a_log_that_nobody_reads_is_no_harm() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb", buffering=0) as raw:
        log = RequestLog(ServerSettings(model="x"), io.TextIOWrapper(raw, write_through=True))
        log(RequestRecord("req-1", "GET", "/none"))
