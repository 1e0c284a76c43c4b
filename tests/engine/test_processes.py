"""Tensor parallelism over real processes: started by LLM, or by torchrun; and what happens when one dies."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from phalanx import LLM, build_engine
from phalanx.config import ConfigError
from phalanx.distributed.group import GroupError

pytestmark = pytest.mark.xdist_group("processes")
REPOSITORY = Path(__file__).parents[2]


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"


def test_started_ranks_answer_alike_and_a_killed_one_ends_the_engine(
    tiny_folder: Path, prompts: list[list[int]]
) -> None:
    expected = LLM(tiny_folder, num_blocks=100, block_size=4).generate(prompts, max_tokens=8, logprobs=1)
    llm = LLM(tiny_folder, tensor_parallel_size=2, num_blocks=100, block_size=4)
    ranks = llm._team.ranks
    assert ranks is not None
    found = llm.generate(prompts, max_tokens=8, logprobs=1)
    assert [o.outputs[0].token_ids for o in found] == [o.outputs[0].token_ids for o in expected]
    assert "".join(chunk.text for chunk in llm.stream("hello", max_tokens=4))
    (pid,) = ranks.pids
    os.kill(pid, signal.SIGKILL)
    started = time.monotonic()
    with pytest.raises(GroupError, match="rank 1 was killed by SIGKILL"):
        llm.generate(prompts, max_tokens=200, ignore_eos=True)
    assert time.monotonic() - started < 10
    with pytest.raises(RuntimeError, match="this engine is closed"):
        llm.generate(prompts, max_tokens=2)
    llm.close()
    assert not is_alive(pid)


def test_closing_leaves_no_process_and_serialising_needs_no_original(tiny_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "serialised"
    ids = list(range(3, 40))
    with build_engine(tiny_folder, tensor_parallel_size=2, num_blocks=64) as engine:
        expected = engine.put([0], [ids], logits="all")
        engine.serialize(folder)
        pids = engine.team.ranks.pids if engine.team.ranks is not None else []
    assert len(pids) == 1 and not any(map(is_alive, pids))
    assert sorted(path.suffix for path in folder.iterdir()) == [".json"] * 3 + [".safetensors"] * 2
    with build_engine(folder, tensor_parallel_size=2, num_blocks=64) as engine:
        assert torch.equal(engine.put([0], [ids], logits="all"), expected)
    with pytest.raises(
        ValueError, match="serialised with tensor_parallel_size=2, this engine has tensor_parallel_size=1"
    ):
        build_engine(folder, num_blocks=64)


def test_a_rank_that_cannot_start_is_an_error_not_a_hang(tiny_folder: Path) -> None:
    started = time.monotonic()
    with pytest.raises((GroupError, ValueError)):
        LLM(tiny_folder, tensor_parallel_size=2, kv_cache_memory=10)
    assert time.monotonic() - started < 60


def test_a_module_in_memory_cannot_be_opened_by_other_processes() -> None:
    with pytest.raises(ConfigError, match="give it as a path or hub id"):
        LLM({}, hf_config={"model_type": "llama"}, tensor_parallel_size=2)


def test_under_torchrun_every_rank_gets_rank_0s_results(tiny_folder: Path, tmp_path: Path) -> None:
    script = Path(__file__).with_name("spmd_script.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    paths = [str(REPOSITORY / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(
        [*command, str(tiny_folder), str(tmp_path)], env=environment, capture_output=True, text=True, timeout=180
    )
    assert done.returncode == 0, done.stderr[-3000:]
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)]
    assert "outside the vocabulary" in ranks[0]["error"] and "outside the vocabulary" in ranks[1]["error"]
    assert ranks[0]["tokens"] == ranks[1]["tokens"] and ranks[0]["drawn"] == ranks[1]["drawn"]
    assert ranks[0]["logits"] == ranks[1]["logits"]
    assert "use generate or chat" in ranks[0]["refused"] and ranks[0]["refused"] == ranks[1]["refused"]
    served = {path.name for path in (tmp_path / "served").iterdir()}
    assert {"rank_0_of_2.safetensors", "rank_1_of_2.safetensors", "phalanx.json", "tokenizer.json"} <= served
    alone = LLM(tiny_folder, num_blocks=64, block_size=4).generate([[5, 6, 7], [8, 9]], max_tokens=6, ignore_eos=True)
    assert ranks[0]["tokens"] == [output.outputs[0].token_ids for output in alone]
