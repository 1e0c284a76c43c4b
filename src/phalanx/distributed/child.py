"""What a rank started by `launch` runs first: tie its life to the parent's, then become the module it was started for.

    python -m phalanx.distributed.child MODULE [ARGUMENT ...]

Imports only the standard library, so that the tie holds before anything that takes long.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys
import threading

_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """From now on this process ends when its parent does, however that ends.

    Standard input is a pipe that only the parent holds open; its end is the parent's. On Linux the kernel does the same
    by itself, which works also while a C call keeps Python from running.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    threading.Thread(target=_wait_for_end, args=(sys.stdin.fileno(),), name="parent watch", daemon=True).start()


def _wait_for_end(pipe: int) -> None:
    while os.read(pipe, 1):
        pass
    os._exit(1)


if __name__ == "__main__":
    end_with_parent()
    module, sys.argv = sys.argv[1], sys.argv[1:]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
