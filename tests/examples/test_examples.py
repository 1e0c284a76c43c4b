"""The examples run, and say what the library says."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

from phalanx import LLM

EXAMPLES = Path(__file__).parents[2] / "examples"
NAMES = ("generate", "stream", "async_llm", "own_scheduler")


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    def script(name: str, *arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
        return capsys.readouterr().out

    return script


def test_every_example_is_here() -> None:
    # That of Ray is run by tests/server/test_ray.py.
    assert sorted(path.stem for path in EXAMPLES.glob("*.py")) == sorted([*NAMES, "ray_serve"])


def test_generate(run, tiny_folder: Path) -> None:
    text = run("generate", str(tiny_folder))
    assert "Who wrote Hamlet?\n  " in text and "Once upon a time" in text and text.count(": -") == 8


def test_stream(run, tiny_folder: Path) -> None:
    text = run("stream", str(tiny_folder))
    assert text.endswith(("\n[length]\n", "\n[stop]\n"))


def test_async_llm(run, tiny_folder: Path) -> None:
    assert "What is 5 plus 5?\n  " in run("async_llm", str(tiny_folder))


def test_own_scheduler_answers_like_ours(run, tiny_folder: Path) -> None:
    prompts = [[5, 6, 7, 8, 9], list(range(10, 80)), [11, 12], [30, 31, 32]]
    with LLM(tiny_folder, num_blocks=64) as llm:
        outputs = llm.generate(prompts, max_tokens=8, ignore_eos=True)
    expected = [f"{place}: {output.outputs[0].token_ids}" for place, output in enumerate(outputs)]
    assert sorted(run("own_scheduler", str(tiny_folder)).splitlines()) == expected


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_with_the_real_model(run, name: str) -> None:
    text = run(name)
    assert {"generate": "Paris", "stream": "scattering", "async_llm": "What is 2 plus 2?", "own_scheduler": "3: ["}[
        name
    ] in text
