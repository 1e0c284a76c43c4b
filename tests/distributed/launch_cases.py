"""Programs of the launch tests: `python -m tests.distributed.launch_cases WHAT`."""

from __future__ import annotations

import os
import signal
import sys
import time


def parent(how: str) -> None:
    """Start two ranks that sleep, print their process ids, then end in one of several ways."""
    from phalanx.distributed.launch import Ranks  # not above: the ranks themselves come up without torch

    ranks = Ranks(3, "tests.distributed.launch_cases", ["sleep"])
    print(*ranks.pids, flush=True)
    if how == "wait":
        time.sleep(60)
    elif how == "raise":
        raise SystemExit("an error in the program")
    elif how == "leave at once":
        os._exit(3)


def place() -> None:
    """What a rank sees around it, on standard error."""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "OMP_NUM_THREADS", "EXTRA")
    print(*[os.environ.get(name) for name in names], *sys.argv[2:], file=sys.stderr)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["parent", how]:
            parent(how)
        case ["place", *_]:
            place()
        case ["sleep"]:
            time.sleep(60)
        case ["stubborn"]:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            print("ready", file=sys.stderr, flush=True)
            time.sleep(60)
        case ["fail", *_]:
            print("first line\nlast line", file=sys.stderr)
            raise SystemExit(int(sys.argv[2]) if os.environ["RANK"] == "1" else 0)
        case other:
            raise ValueError(other)
