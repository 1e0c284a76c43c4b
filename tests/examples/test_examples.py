"""The examples run, and say what the library says."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

from phalanx import LLM
from tests.models.tiny import llama, llama_config, save
from tests.tiny_tokenizer import VOCAB_SIZE, tiny_tokenizer

EXAMPLES = Path(__file__).parents[2] / "examples"
NAMES = ("generate", "stream", "async_llm", "own_scheduler")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    save(llama(llama_config(vocab_size=VOCAB_SIZE, max_position_embeddings=512), seed=3), folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    def script(name: str, *arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
        return capsys.readouterr().out

    return script


def test_every_example_is_here() -> None:
    assert sorted(path.stem for path in EXAMPLES.glob("*.py")) == sorted(NAMES)


def test_generate(run, tiny: Path) -> None:
    text = run("generate", str(tiny))
    assert "Who wrote Hamlet?\n  " in text and "Once upon a time" in text and text.count(": -") == 8


def test_stream(run, tiny: Path) -> None:
    text = run("stream", str(tiny))
    assert text.endswith(("\n[length]\n", "\n[stop]\n"))


def test_async_llm(run, tiny: Path) -> None:
    assert "What is 5 plus 5?\n  " in run("async_llm", str(tiny))


def test_own_scheduler_answers_like_ours(run, tiny: Path) -> None:
    prompts = [[5, 6, 7, 8, 9], list(range(10, 80)), [11, 12], [30, 31, 32]]
    with LLM(tiny, num_blocks=64) as llm:
        outputs = llm.generate(prompts, max_tokens=8, ignore_eos=True)
    expected = [f"{place}: {output.outputs[0].token_ids}" for place, output in enumerate(outputs)]
    assert sorted(run("own_scheduler", str(tiny)).splitlines()) == expected


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_with_the_real_model(run, name: str) -> None:
    text = run(name)
    assert {"generate": "Paris", "stream": "scattering", "async_llm": "What is 2 plus 2?", "own_scheduler": "3: ["}[
        name
    ] in text
