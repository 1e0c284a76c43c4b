import json
import sys
from pathlib import Path

import pytest

from phalanx.bench import vllm_peer
from phalanx.bench.samples import Sample
from phalanx.bench.vllm_peer import VLLM

# What stands in for a module named vllm: answers count up, and its constructor's arguments are written down.
FAKE = """
import json, os
from types import SimpleNamespace as Made

__version__ = "9.9"
SamplingParams = TokensPrompt = Made

def answer(prompt, params):
    assert params.temperature == 0 and params.ignore_eos
    return Made(outputs=[Made(token_ids=[prompt.prompt_token_ids[0] + i for i in range(params.max_tokens)])])

class LLM:
    def __init__(self, **settings):
        threads = os.environ.get("OMP_NUM_THREADS")
        json.dump({**settings, "threads": threads, "path": os.environ.get("PYTHONPATH")}, open("settings.json", "w"))
        self.llm_engine, self.waiting = self, []

    def generate(self, prompts, params, use_tqdm):
        return [answer(*both) for both in zip(prompts, params, strict=True)]

    def add_request(self, name, prompt, params):
        self.waiting = [answer(prompt, Made(**{**vars(params), "max_tokens": n + 1})) for n in range(params.max_tokens)]

    def has_unfinished_requests(self):
        return bool(self.waiting)

    def step(self):
        return [self.waiting.pop(0)]
"""


@pytest.fixture
def peer(tmp_path, monkeypatch):
    """VLLM in this interpreter, whose script finds the fake beside it."""
    (tmp_path / "vllm.py").write_text(FAKE)
    script = tmp_path / "vllm_script.py"
    script.write_bytes(vllm_peer.SCRIPT.read_bytes())
    monkeypatch.setattr(vllm_peer, "SCRIPT", script)
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    monkeypatch.chdir(tmp_path)
    return VLLM(Path(sys.executable), tmp_path / "model", "eager", tmp_path, {"dtype": "float32"}, threads=1)


@pytest.mark.parametrize("kind", ["throughput", "latency"])
def test_the_script_runs_the_plan_in_its_own_environment(peer, plan, kind, tmp_path):
    from dataclasses import replace

    with peer:
        samples = peer.measure(replace(plan, kind=kind, repeats=2))
    assert len(samples) == 2 and isinstance(samples[0], Sample) and peer.version == "9.9"
    pairs = list(zip(plan.workload.prompts, plan.workload.output_lens, strict=True))
    assert samples[1].answers == [[prompt[0] + i for i in range(length)] for prompt, length in pairs]
    times = [len(stamps) for stamps in samples[1].token_times]
    assert times == (plan.workload.output_lens if kind == "latency" else [])
    settings = json.loads((tmp_path / "settings.json").read_text())
    assert settings["model"] == str(tmp_path / "model") and settings["enforce_eager"] is True
    assert settings["enable_prefix_caching"] is False
    # The tests' own path would hide that environment's packages behind ours.
    assert (settings["threads"], settings["path"]) == ("1", None)


def test_a_script_that_fails_is_told(peer, plan, tmp_path):
    (tmp_path / "vllm.py").write_text("raise ImportError('no vllm')")
    with pytest.raises(RuntimeError, match="ended with status 1"):
        peer.measure(plan)
