"""Memory that loading has freed, given back to the operating system."""

from __future__ import annotations

import ctypes
import sys


def give_back_freed_memory() -> None:
    """Lets go of the holes that buffers of tens of megabytes leave between tensors that stay.

    The C library keeps them for itself, and they add up over a model's layers. Where it is not glibc, nothing is done.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)
