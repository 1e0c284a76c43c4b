"""Running a plan on an engine of this process, and the figures of what was measured."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Self

from phalanx.bench.workload import Plan, Workload


@dataclass(frozen=True)
class Sample:
    """One run of a workload.

    Attributes:
        wall_s, cpu_s: seconds, by the clock and of all threads of the process; None where other processes worked too.
        answers: the token ids that came.
        token_times: of "latency", for each prompt the seconds from its start to each token.
    """

    wall_s: float
    cpu_s: float | None
    answers: list[list[int]]
    token_times: list[list[float]] = field(default_factory=list)


class Contender(ABC):
    """An engine that is measured. It is opened by ``with``, so that nothing of it is there while another is measured.

    Attributes:
        engine, mode: what it is called.
    """

    engine: str
    mode: str

    @abstractmethod
    def measure(self, plan: Plan) -> list[Sample]:
        """Warms up and runs the workload ``plan.repeats`` times."""

    @abstractmethod
    def close(self) -> None:
        """Lets go of everything."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()


class LocalContender(Contender):
    """An engine that runs in this process."""

    alone = True
    """Whether all of its work is done by this process."""

    @abstractmethod
    def answer(self, workload: Workload) -> list[list[int]]:
        """The answers to all prompts, as fast as can be."""

    @abstractmethod
    def stream(self, prompt: list[int], length: int, on_token: Callable[[int], None]) -> None:
        """One answer, each token told as it comes."""

    def measure(self, plan: Plan) -> list[Sample]:
        run = self._timed_answers if plan.kind == "throughput" else self._timed_streams
        run(plan.warm_up)
        return [run(plan.workload) for _ in range(plan.repeats)]

    def _timed_answers(self, workload: Workload) -> Sample:
        wall, cpu = time.perf_counter(), time.process_time()
        answers = self.answer(workload)
        return self._sample(wall, cpu, answers)

    def _timed_streams(self, workload: Workload) -> Sample:
        wall, cpu = time.perf_counter(), time.process_time()
        answers: list[list[int]] = []
        times: list[list[float]] = []
        for prompt, length in zip(workload.prompts, workload.output_lens, strict=True):
            answer: list[int] = []
            stamps: list[float] = []
            begun = time.perf_counter()

            def on_token(token: int, into: list[int] = answer, at: list[float] = stamps, since: float = begun) -> None:
                at.append(time.perf_counter() - since)
                into.append(token)

            self.stream(prompt, length, on_token)
            answers.append(answer)
            times.append(stamps)
        return self._sample(wall, cpu, answers, times)

    def _sample(
        self, wall: float, cpu: float, answers: list[list[int]], times: list[list[float]] | None = None
    ) -> Sample:
        spent = time.process_time() - cpu if self.alone else None
        return Sample(time.perf_counter() - wall, spent, answers, times or [])


def figures(plan: Plan, samples: list[Sample]) -> dict[str, Any]:
    """What the samples say: medians over the repetitions of a throughput, percentiles over all tokens of a latency."""
    output, total = plan.workload.output_tokens, plan.workload.prompt_tokens + plan.workload.output_tokens
    wall = statistics.median(sample.wall_s for sample in samples)
    cpu = [sample.cpu_s for sample in samples if sample.cpu_s]
    found: dict[str, Any] = {
        "wall_s": [round(sample.wall_s, 4) for sample in samples],
        "cpu_s": [round(seconds, 4) for seconds in cpu],
        "output_tok_per_s": round(output / wall, 2),
        "total_tok_per_s": round(total / wall, 2),
        "output_tok_per_core_s": round(output / statistics.median(cpu), 2) if cpu else None,
    }
    if plan.kind == "latency":
        firsts = [times[0] for sample in samples for times in sample.token_times if times]
        between = [
            later - earlier
            for sample in samples
            for times in sample.token_times
            for earlier, later in itertools.pairwise(times)
        ]
        found["first_token_ms"] = percentiles(firsts)
        found["inter_token_ms"] = percentiles(between)
    return found


def percentiles(seconds: list[float]) -> dict[str, float | None]:
    """p50 and p99 in milliseconds, of the values themselves (nearest rank)."""
    ordered = sorted(seconds)
    if not ordered:
        return {"p50": None, "p99": None}
    return {
        name: round(1000 * ordered[math.ceil(share * len(ordered)) - 1], 3)
        for name, share in (("p50", 0.5), ("p99", 0.99))
    }
