"""What HTTP costs the engine: the same prompts through ``LLM`` and through ``phalanx serve``, the engine on one core.

    python benchmarks/serving/http_overhead.py --output FILE.json

The engine's process is pinned to the first core in both runs, client and HTTP to the second. Each round runs the
library, the server with whole and with streamed answers, in an order of its own. Beside tokens a second, which other
work on the machine disturbs, stand the CPU time of the engine's process, which it disturbs less, and its steps:
requests that trickle in make smaller batches, and so more steps.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

FLAGS = {"num_threads": 1, "num_blocks": 2000, "dtype": "float32", "max_num_seqs": 16}
_TICKS = os.sysconf("SC_CLK_TCK")


def prompts(count: int, turn: int) -> list[str]:
    """As many that share no beginning with those of another turn."""
    return [f"{turn}.{place}: what is {place} plus {place * 7}? Tell me in detail, please." for place in range(count)]


def offline(model: str, count: int, tokens: int) -> None:
    """In a process of its own: a line of JSON for each line that comes in."""
    os.sched_setaffinity(0, {0})
    from phalanx import LLM

    with LLM(model, **FLAGS) as llm:
        llm.generate(prompts(4, 0), max_tokens=8, ignore_eos=True)
        print("{}", flush=True)
        for turn in map(int, sys.stdin):
            texts = prompts(count, turn)
            steps, began, cpu = llm.stats().steps, time.perf_counter(), time.process_time()
            llm.generate(texts, max_tokens=tokens, ignore_eos=True)
            seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
            steps = llm.stats().steps - steps
            print(json.dumps({"seconds": seconds, "cpu_seconds": cpu, "steps": steps}), flush=True)


class Library:
    """``offline`` in its process."""

    def __init__(self, asked: argparse.Namespace) -> None:
        command = [sys.executable, __file__, "--model", asked.model, "--worker"]
        command += ["--prompts", str(asked.prompts), "--tokens", str(asked.tokens)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._read()

    def _read(self) -> dict[str, float]:
        assert self._process.stdout is not None
        found: dict[str, float] = json.loads(self._process.stdout.readline())
        return found

    def run(self, turn: int) -> dict[str, float]:
        assert self._process.stdin is not None
        print(turn, file=self._process.stdin, flush=True)
        return self._read()

    def close(self) -> None:
        self._process.communicate()


class Served:
    """``phalanx serve``, its engine on the first core."""

    def __init__(self, asked: argparse.Namespace) -> None:
        import openai

        self._asked = asked
        command = [sys.executable, "-m", "phalanx.cli", "serve", asked.model, "--json", "--port", "0", "--threads", "1"]
        command += ["--num-blocks", str(FLAGS["num_blocks"]), "--dtype", "float32", "--max-num-seqs", "16"]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        assert self._process.stdout is not None
        self._url = url = json.loads(self._process.stdout.readline())["ready"]
        self._engine = self._engine_pid()
        pin(self._engine, {0})
        pin(self._process.pid, {1})
        self._loop = asyncio.new_event_loop()
        self._client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", timeout=600)
        self._loop.run_until_complete(self._ask_all(prompts(4, 0), 8, stream=True))

    def _engine_pid(self) -> int:
        for task in Path(f"/proc/{self._process.pid}/task").iterdir():
            for child in map(int, (task / "children").read_text().split()):
                if b"engine_process" in Path(f"/proc/{child}/cmdline").read_bytes():
                    return child
        raise RuntimeError("the server has no engine process")

    def run(self, turn: int, stream: bool) -> dict[str, float]:
        texts = prompts(self._asked.prompts, turn)
        steps, began, cpu = self._steps(), time.perf_counter(), cpu_seconds(self._engine)
        self._loop.run_until_complete(self._ask_all(texts, self._asked.tokens, stream))
        seconds = time.perf_counter() - began
        cpu = cpu_seconds(self._engine) - cpu
        return {"seconds": seconds, "cpu_seconds": cpu, "steps": self._steps() - steps}

    def _steps(self) -> float:
        # The engine tells of itself a few times a second, and when its work has ended.
        time.sleep(0.5)
        with urllib.request.urlopen(f"{self._url}/metrics") as answer:
            lines = answer.read().decode().splitlines()
        return float(next(line for line in lines if line.startswith("phalanx:steps_total")).rpartition(" ")[2])

    async def _ask_all(self, texts: list[str], tokens: int, stream: bool) -> None:
        await asyncio.gather(*(self._ask(text, tokens, stream) for text in texts))

    async def _ask(self, text: str, tokens: int, stream: bool) -> None:
        asked: dict[str, Any] = {"model": self._asked.model, "prompt": text, "max_tokens": tokens, "temperature": 0}
        asked["extra_body"] = {"ignore_eos": True}
        if not stream:
            await self._client.completions.create(**asked)
            return
        async for _ in await self._client.completions.create(stream=True, **asked):
            pass

    def close(self) -> None:
        self._loop.run_until_complete(self._client.close())
        self._process.terminate()
        self._process.wait()


def pin(pid: int, cores: set[int]) -> None:
    """All threads of a process."""
    for task in os.listdir(f"/proc/{pid}/task"):
        os.sched_setaffinity(int(task), cores)


def cpu_seconds(pid: int) -> float:
    """Of a process, in the user's mode and the kernel's."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--prompts", type=int, default=48)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.worker:
        offline(asked.model, asked.prompts, asked.tokens)
        return
    found: dict[str, list[dict[str, float]]] = {"library": [], "server, whole": [], "server, streamed": []}
    os.sched_setaffinity(0, {0, 1})
    library = Library(asked)
    served = Served(asked)
    os.sched_setaffinity(0, {1})
    try:
        for number in range(1, asked.rounds + 1):
            ways = [
                ("library", lambda turn: library.run(turn)),
                ("server, whole", lambda turn: served.run(turn, stream=False)),
                ("server, streamed", lambda turn: served.run(turn, stream=True)),
            ]
            for place, (name, run) in enumerate(ways[number % 3 :] + ways[: number % 3]):
                found[name].append(run(10 * number + place))
            print({name: runs[-1] for name, runs in found.items()}, file=sys.stderr)
    finally:
        served.close()
        library.close()
    report(asked, found)


def report(asked: argparse.Namespace, found: dict[str, list[dict[str, float]]]) -> None:
    """Medians, as a table and as JSON."""
    tokens = asked.prompts * asked.tokens
    medians = {
        name: {key: statistics.median(run[key] for run in runs) for key in runs[0]} for name, runs in found.items()
    }
    base = medians["library"]
    for name, median in medians.items():
        median["tokens_per_second"] = tokens / median["seconds"]
        median["throughput_ratio"] = base["seconds"] / median["seconds"]
        median["cpu_ratio"] = base["cpu_seconds"] / median["cpu_seconds"]
        median["tokens_per_step"] = tokens / median["steps"]
        print(
            f"{name:18} {median['tokens_per_second']:7.1f} tokens/s ({median['throughput_ratio']:.3f})   "
            f"engine {median['cpu_seconds']:6.2f} s of CPU ({median['cpu_ratio']:.3f}), "
            f"{median['steps']:.0f} steps of {1000 * median['cpu_seconds'] / median['steps']:.1f} ms of CPU"
        )
    if asked.output is not None:
        workload = {"model": asked.model, "prompts": asked.prompts, "tokens": asked.tokens, **FLAGS}
        told = {"command": sys.argv, "workload": workload, "machine": machine()}
        asked.output.write_text(json.dumps({**told, "runs": found, "medians": medians}, indent=1) + "\n")


def machine() -> dict[str, Any]:
    """What the figures depend on."""
    import torch
    import transformers

    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    cpus = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in cpus if line.startswith("model name")]
    return {
        "processor": names[0] if names else platform.processor(),
        "cores": os.cpu_count(),
        "load": os.getloadavg(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "commit": commit,
    }


if __name__ == "__main__":
    main()
