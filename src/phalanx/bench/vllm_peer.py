"""vLLM as a contender: a script of ours in the Python environment that has it."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import asdict
from pathlib import Path
from typing import Any

from phalanx.bench.samples import Contender, Sample
from phalanx.bench.workload import Plan

STDERR = 2  # the file descriptor
SCRIPT = Path(__file__).with_name("vllm_script.py")


class VLLM(Contender):
    """vLLM in a process of its own, engine core included, so that its CPU time can be read.

    Args:
        python: an interpreter that can import vllm.
        folder: a Hugging Face folder.
        mode: "compiled" or "eager".
        scratch: a folder for the exchange of files.
        settings: keywords of ``vllm.LLM``.
        threads: OpenMP threads; None leaves them to vLLM.
    """

    engine = "vllm"

    def __init__(
        self, python: Path, folder: Path, mode: str, scratch: Path, settings: dict[str, Any], threads: int | None
    ) -> None:
        self.mode = mode
        self.version: str | None = None
        self._python = python
        self._scratch = scratch
        self._settings = {**settings, "model": str(folder), "enforce_eager": mode == "eager"}
        self._threads = threads

    def measure(self, plan: Plan) -> list[Sample]:
        order, result = self._scratch / "vllm_order.json", self._scratch / "vllm_result.json"
        order.write_text(json.dumps({"plan": asdict(plan), "settings": self._settings}))
        result.unlink(missing_ok=True)
        command = [str(self._python), str(SCRIPT), str(order), str(result)]
        # Its own prints go to our standard error: standard output is for the result.
        done = subprocess.run(command, env=self._environment(), stdout=STDERR, check=False)
        if done.returncode or not result.is_file():
            raise RuntimeError(f"{' '.join(command)} ended with status {done.returncode}; see its output above")
        found = json.loads(result.read_text())
        self.version = found["version"]
        return [Sample(**sample) for sample in found["samples"]]

    def close(self) -> None: ...

    def _environment(self) -> dict[str, str]:
        env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
        env["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        if self._threads is not None:
            cores = sorted(os.sched_getaffinity(0))[: self._threads]
            env["OMP_NUM_THREADS"] = str(self._threads)
            env["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, cores))
        return env
