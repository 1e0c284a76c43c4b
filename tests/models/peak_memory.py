"""A plugin that every rank of an engine imports before its model is built: from here on the peak of its resident memory
counts. Run as a script, it loads a model at TP 2 and prints what each rank took.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

FOLDER = "PEAK_MEMORY_FOLDER"
PLUGIN = "tests.models.peak_memory"


def resident(field: str, pid: int) -> int:
    """Bytes of a line of /proc/<pid>/status: VmRSS now, VmHWM at most."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def start() -> None:
    """Forgets the peak so far and notes what the imports take."""
    Path("/proc/self/clear_refs").write_text("5")
    (Path(os.environ[FOLDER]) / str(os.getpid())).write_text(str(resident("VmRSS", os.getpid())))


def main(model: str) -> None:
    """Prints the bytes above its imports that each rank held at most, as JSON."""
    from phalanx.engine import build_engine

    settings = {"num_blocks": 8, "max_num_batched_tokens": 16, "max_num_seqs": 2, "device": "cpu"}
    with build_engine(model, settings, tensor_parallel_size=2, plugins=(PLUGIN,)):
        started = {int(path.name): int(path.read_text()) for path in Path(os.environ[FOLDER]).iterdir()}
        print(json.dumps([resident("VmHWM", pid) - baseline for pid, baseline in started.items()]))


if __name__ == "__main__":
    main(sys.argv[1])
elif FOLDER in os.environ:
    start()
