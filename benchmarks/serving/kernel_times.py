"""Where the time of a decode step or of a prefill goes: the GPU's kernels, by name.

python benchmarks/serving/kernel_times.py --shape llama-8b --batch 64 --context 1024
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
from benchmarks.idle import idle_times, times_alone
from benchmarks.serving.shapes import SHAPES
from torch.profiler import ProfilerActivity, profile

from phalanx import LLM, SamplingParams


class Times(NamedTuple):
    """Of a repeat, in microseconds."""

    kernels: dict[str, tuple[float, float]]
    """Name -> (launches, durations)."""
    alone: dict[str, float]
    """See ``times_alone``."""
    idle: list[dict[str, Any]]
    """See ``idle_times``."""


def times_of(work: Any, repeats: int) -> Times:
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        for _ in range(repeats):
            work()
        torch.cuda.synchronize()
    found: dict[str, list[float]] = defaultdict(list)
    for event in profiled.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            found[event.name].append(event.device_time)
    kernels = {name: (len(times) / repeats, sum(times) / repeats) for name, times in found.items()}
    return Times(kernels, times_alone(profiled.events(), repeats), idle_times(profiled.events(), repeats))


def show(title: str, times: Times, limit: int = 16, gaps: int = 6) -> None:
    print(f"{title}: {sum(times.alone.values()):,.0f} us with kernels")
    print(f"  {'alone':>9}     {'launches':>8}   {'alone':>9}  {'duration':>9}  name")
    for name, alone in sorted(times.alone.items(), key=lambda item: -item[1])[:limit]:
        count, time = times.kernels[name]
        print(f"  {alone:9,.1f} us  {count:8.1f} x {alone / count:9.2f} {time / count:9.2f} us  {name[:80]}")
    for each in times.idle[: 1 + gaps]:
        print(f"  {each['ms'] * 1e3:9,.1f} us  {each['calls']:8.1f} x  {each['name']}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(SHAPES), default="llama-8b")
    parser.add_argument("--batch", type=int, action="append")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--prefill", action="store_true")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
    given = parser.parse_args()
    settings = {name: json.loads(value) for name, _, value in (item.partition("=") for item in given.set)}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(SHAPES[given.shape]))
        llm = LLM(folder, **{"load_format": "dummy", "prefix_cache": False, "max_model_len": 16384, **settings})
    chance = random.Random(0)

    def prompt(length: int) -> list[int]:
        return [chance.randrange(10000) for _ in range(length)]

    if given.prefill:
        once = SamplingParams(max_tokens=1, ignore_eos=True)
        show("prefill 8 x 1024", times_of(lambda: llm.generate([prompt(1024) for _ in range(8)], once), 2))
    for batch in given.batch or []:
        for _ in range(batch):
            llm.add_request(prompt(given.context), SamplingParams(max_tokens=64, ignore_eos=True))
        while llm.core.scheduler.waiting or any(r.num_generated < 4 for r in llm.core.scheduler.running):
            llm.step()
        show(f"decode, {batch} rows at {given.context}", times_of(llm.step, 10))
        while llm.has_work:
            llm.step()
    llm.close()


if __name__ == "__main__":
    main()
