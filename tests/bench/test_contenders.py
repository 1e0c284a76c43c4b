"""Every contender of this process gives the same answers, all at once and one by one."""

from dataclasses import replace

import pytest
import torch

from phalanx import LLM
from phalanx.bench import PEERS
from phalanx.bench.ours import Phalanx
from phalanx.bench.transformers_peer import Transformers


@pytest.fixture
def expected(tiny_folder, plan):
    with Phalanx(LLM(tiny_folder, num_blocks=64)) as ours:
        (sample,) = ours.measure(plan)
        assert [len(answer) for answer in sample.answers] == plan.workload.output_lens
        assert ours.measure(replace(plan, kind="latency"))[0].answers == sample.answers
    return sample.answers


@pytest.mark.parametrize("mode", PEERS["transformers"])
def test_transformers(tiny_folder, plan, expected, mode):
    with Transformers(tiny_folder, mode, torch.float32, torch.device("cpu"), threads=1) as peer:
        assert peer.measure(plan)[0].answers == expected


def test_transformers_one_by_one_token_by_token(tiny_folder, plan, expected):
    with Transformers(tiny_folder, "single", torch.float32, torch.device("cpu"), None) as peer:
        (sample,) = peer.measure(replace(plan, kind="latency"))
    assert sample.answers == expected
    assert [len(times) for times in sample.token_times] == plan.workload.output_lens


def test_cpu_time_is_known_only_of_one_process(tiny_folder):
    with Phalanx(LLM(tiny_folder, num_blocks=64, block_size=8)) as ours:
        assert ours.alone and ours.mode == "tp 1"
        assert ours.settings == {"num_blocks": 64, "block_size": 8}
