"""The documented deployment on Ray Serve, on one machine."""

from __future__ import annotations

import importlib.util
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from phalanx import LLM
from phalanx.server.asgi import Application
from phalanx.server.settings import ServerSettings
from tests.server.running import NAME

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def client(tiny_folder: Path) -> Iterator[openai.OpenAI]:
    ray = pytest.importorskip("ray")
    from ray import serve

    spec = importlib.util.spec_from_file_location("ray_serve_example", ROOT / "examples" / "ray_serve.py")
    assert spec is not None and spec.loader is not None
    example: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        runtime_env={"env_vars": {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}},
    )
    try:
        engine = {"num_blocks": 200, "block_size": 8, "device": "cpu", "num_threads": 1}
        settings = ServerSettings(model=str(tiny_folder), engine=engine, names=(NAME,), restart=True)
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        serve.start(http_options={"port": port, "host": "127.0.0.1"})
        serve.run(example.deployment(settings, replicas=1, cpus=1, gpus=0), name="phalanx")
        yield openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
    finally:
        serve.shutdown()
        ray.shutdown()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_it_answers_as_the_library_does(client: openai.OpenAI, tiny_folder: Path) -> None:
    with LLM(tiny_folder, num_blocks=100, block_size=8) as llm:
        expected = llm.generate("hello", max_tokens=8)[0].text
        embedding = llm.embed("hello")[0].tolist()
    asked: Any = {"model": NAME, "prompt": "hello", "max_tokens": 8, "temperature": 0}
    assert client.completions.create(**asked).choices[0].text == expected
    chunks = list(client.completions.create(stream=True, **asked))
    assert "".join(chunk.choices[0].text for chunk in chunks) == expected and len(chunks) > 1
    assert client.embeddings.create(model=NAME, input="hello").data[0].embedding == pytest.approx(embedding, abs=1e-5)
    with pytest.raises(openai.BadRequestError, match="suffix"):
        client.completions.create(suffix="x", **asked)


def test_an_application_must_be_started(tiny_folder: Path) -> None:
    import asyncio

    told: list[dict[str, Any]] = []

    async def live() -> None:
        async def startup() -> dict[str, Any]:
            return {"type": "lifespan.startup"}

        async def send(message: Any) -> None:
            told.append(message)

        application = Application(ServerSettings(model=str(tiny_folder), engine={"num_blocks": 1}))
        with pytest.raises(RuntimeError, match="lifespan"):
            await application({"type": "http"}, startup, send)
        await application({"type": "lifespan"}, startup, send)

    asyncio.run(live())
    assert told[0]["type"] == "lifespan.startup.failed" and "num_blocks" in told[0]["message"]
