import time

import pytest

from phalanx.bench.samples import LocalContender, Sample, figures, percentiles
from phalanx.bench.workload import Plan, Workload

WARM_UP, WORKLOAD = Workload([[1]], [1]), Workload([[1, 2], [3]], [2, 3])


class Fake(LocalContender):
    """Answers with the prompt's length, and takes a while for it."""

    engine, mode = "fake", "plain"

    def __init__(self):
        self.calls = []

    def answer(self, workload):
        self.calls.append(workload)
        time.sleep(0.02)
        return [[len(p)] * n for p, n in zip(workload.prompts, workload.output_lens, strict=True)]

    def stream(self, prompt, length, on_token):
        self.calls.append(prompt)
        for _ in range(length):
            time.sleep(0.01)
            on_token(len(prompt))

    def close(self):
        self.calls.append("closed")


def test_all_at_once():
    with Fake() as fake:
        samples = fake.measure(Plan("throughput", WARM_UP, WORKLOAD, repeats=2))
    assert fake.calls == [WARM_UP, WORKLOAD, WORKLOAD, "closed"]
    for sample in samples:
        assert sample.answers == [[2, 2], [1, 1, 1]] and 0.02 <= sample.wall_s < 1 and sample.cpu_s < sample.wall_s


def test_one_after_the_other():
    (sample,) = Fake().measure(Plan("latency", WARM_UP, WORKLOAD, repeats=1))
    assert sample.answers == [[2, 2], [1, 1, 1]] and [len(times) for times in sample.token_times] == [2, 3]
    assert all(times == sorted(times) and times[0] >= 0.01 for times in sample.token_times)


def test_processes_beside_this_one_have_no_cpu_time():
    fake = Fake()
    fake.alone = False
    assert fake.measure(Plan("throughput", WARM_UP, WORKLOAD, repeats=1))[0].cpu_s is None


def test_figures_of_a_throughput_are_medians():
    plan = Plan("throughput", WARM_UP, WORKLOAD, 3)
    found = figures(plan, [Sample(wall, cpu, []) for wall, cpu in ((1.0, 4.0), (9.0, 2.0), (2.0, 2.5))])
    assert found == {
        "wall_s": [1.0, 9.0, 2.0],
        "cpu_s": [4.0, 2.0, 2.5],
        "output_tok_per_s": 5 / 2,
        "total_tok_per_s": 8 / 2,
        "output_tok_per_core_s": 5 / 2.5,
    }
    assert figures(plan, [Sample(1.0, None, [])])["output_tok_per_core_s"] is None


def test_figures_of_a_latency_tell_the_first_token_from_the_others():
    samples = [Sample(1.0, 1.0, [], [[0.5, 0.6], [0.1, 0.2, 0.5]]), Sample(1.0, 1.0, [], [[0.2], []])]
    found = figures(Plan("latency", WARM_UP, WORKLOAD, 2), samples)
    assert found["first_token_ms"] == {"p50": 200, "p99": 500}
    assert found["inter_token_ms"] == {"p50": 100, "p99": 300}


@pytest.mark.parametrize(
    ("values", "p50", "p99"),
    [([], None, None), ([1], 1, 1), ([2, 1], 1, 2), (range(1, 101), 50, 99), (range(1, 1001), 500, 990)],
)
def test_percentiles(values, p50, p99):
    assert percentiles([value / 1000 for value in values]) == {"p50": p50, "p99": p99}
