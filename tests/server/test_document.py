"""schemathesis reads our OpenAPI document and asks what it likes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.server.running import NAME, Server

pytestmark = pytest.mark.xdist_group("server")


def test_the_document_names_requests_and_errors(server: Server) -> None:
    document = server.http.get("/openapi.json").json()
    schemas = document["components"]["schemas"]
    for path, request in (("/v1/completions", "CompletionRequest"), ("/v1/chat/completions", "ChatRequest")):
        operation = document["paths"][path]["post"]
        content = operation["requestBody"]["content"]["application/json"]
        assert content["schema"]["$ref"] == f"#/components/schemas/{request}"
        assert schemas[request]["additionalProperties"] is False
        assert {"200", "400", "401", "408", "413", "429", "503"} <= set(operation["responses"])
    assert "text/event-stream" in document["paths"]["/v1/completions"]["post"]["responses"]["200"]["content"]


@pytest.mark.slow
def test_no_server_error_in_two_thousand_cases(server: Server, tmp_path: Path) -> None:
    pid = server.engine_pid
    hooks = tmp_path / "model_name.py"
    hooks.write_text(
        "import schemathesis\n\n\n@schemathesis.hook\ndef map_body(context, body):\n"
        f"    if isinstance(body, dict) and isinstance(body.get('model'), str):\n        body['model'] = {NAME!r}\n"
        "    limit = {'/v1/completions': 'max_tokens', '/v1/chat/completions': 'max_tokens',\n"
        "             '/v1/responses': 'max_output_tokens'}.get(context.operation.path)\n"
        "    if isinstance(body, dict) and limit:\n        body[limit] = 2\n    return body\n"
    )
    command = [sys.executable, "-m", "schemathesis.cli", "run", f"{server.url}/openapi.json", "--seed", "1"]
    command += ["--max-examples", "350", "--phases", "fuzzing", "--checks", "not_a_server_error"]
    command += ["--request-timeout", "60", "--no-color"]
    environment = {**os.environ, "SCHEMATHESIS_HOOKS": str(hooks), "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)
    print(done.stdout[-3000:], done.stderr[-2000:])
    counted = re.search(r"(\d+) generated", done.stdout)
    assert done.returncode == 0 and counted is not None and int(counted[1]) >= 2000
    assert server.engine_pid == pid and server.complete(prompt="hello", max_tokens=1).status_code == 200
    server.wait_idle()
