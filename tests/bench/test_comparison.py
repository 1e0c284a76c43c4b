import pytest

from phalanx.bench.comparison import compare
from phalanx.bench.samples import Contender, Sample
from phalanx.bench.workload import Plan, Workload

WORKLOAD = Workload([[1], [2]], [2, 1])
RIGHT = [[5, 6], [7]]
open_now = []


class Fixed(Contender):
    """Gives a sample that is known beforehand, and minds that no other contender is open."""

    def __init__(self, engine, mode, sample):
        assert not open_now, "two contenders at once"
        open_now.append(self)
        self.engine, self.mode, self.sample = engine, mode, sample

    def measure(self, plan):
        if self.sample is None:
            raise RuntimeError("it broke")
        return [self.sample]

    def close(self):
        open_now.remove(self)


def fixed(engine, mode, *sample):
    return engine, mode, lambda: Fixed(engine, mode, Sample(*sample) if sample else None)


def test_the_ratio_is_to_the_best_of_the_others():
    ours = fixed("phalanx", "tp 1", 1.0, 2.0, RIGHT)[2]
    peers = [
        fixed("other", "slow", 4.0, 1.0, RIGHT),
        fixed("other", "fast", 2.0, 1.0, [[5, 6], [8]]),
        fixed("other", "broken"),
    ]
    lines = []
    found = compare(Plan("throughput", WORKLOAD, WORKLOAD, 1), ours, peers, lines.append)
    assert not open_now
    names = [line.split(" in ")[0] for line in lines]
    assert names[:4] == ["phalanx: begins", "phalanx: done", "other slow: begins", "other slow: done"]
    assert names[-1] == "other broken: begins"
    assert found["best_peer"] == "other fast"
    assert found["ratio"] == {"output_tok_per_s": 2.0, "output_tok_per_core_s": 0.5}
    assert [result.get("identical_answers") for result in found["results"]] == [None, 2, 1, None]
    assert found["results"][3] == {"engine": "other", "mode": "broken", "error": "RuntimeError: it broke"}


def test_of_a_latency_less_is_better():
    plan = Plan("latency", WORKLOAD, WORKLOAD, 1)
    ours = fixed("phalanx", "tp 1", 1.0, 1.0, RIGHT, [[0.2, 0.3], [0.2]])[2]
    found = compare(plan, ours, [fixed("other", "single", 1.0, 1.0, RIGHT, [[0.1, 0.5], [0.1]])])
    assert found["ratio"] == {"first_token_ms": 0.5, "inter_token_ms": 4.0}


def test_alone_there_is_no_ratio():
    found = compare(Plan("throughput", WORKLOAD, WORKLOAD, 1), fixed("phalanx", "tp 1", 1.0, 1.0, RIGHT)[2], [])
    assert found["ratio"] is None and found["best_peer"] is None and len(found["results"]) == 1


def test_answers_of_another_length_are_no_measurement():
    plan = Plan("throughput", WORKLOAD, WORKLOAD, 1)
    with pytest.raises(RuntimeError, match="answers of 2 tokens came, 3 were asked for"):
        compare(plan, fixed("phalanx", "tp 1", 1.0, 1.0, [[5], [7]])[2], [])
    assert not open_now
