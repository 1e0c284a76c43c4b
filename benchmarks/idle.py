"""When a GPU has nothing to do, and which kernels its time passes with, by a profile."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch


def idle_times(events: Any, steps: int, longest: int = 12) -> list[dict[str, Any]]:
    """The times in which no kernel runs: all of them, and the longest with what ran before and after."""
    found = []
    busy_until, last = None, ""
    for start, end, name in _kernels(events):
        if busy_until is not None and start > busy_until:
            found.append({"name": f"idle: {last[:40]} ... {name[:40]}", "ms": (start - busy_until) / 1e3, "calls": 1})
        if busy_until is None or end > busy_until:
            busy_until, last = end, name
    whole = {"name": "idle", "ms": sum(each["ms"] for each in found) / steps, "calls": len(found) / steps}
    return [whole, *sorted(found, key=lambda each: -each["ms"])[:longest]] if found else []


def times_alone(events: Any, steps: int) -> dict[str, float]:
    """Name -> microseconds a step that pass with a kernel after all that started before it have ended.

    A kernel that starts early waits beside the one ahead of it: its duration counts that time again. These times and
    the idle ones add up to what a step takes.
    """
    found: dict[str, float] = defaultdict(float)
    busy_until = float("-inf")
    for start, end, name in _kernels(events):
        if end > busy_until:
            found[name] += (end - max(start, busy_until)) / steps
            busy_until = end
    return dict(found)


def _kernels(events: Any) -> list[tuple[float, float, str]]:
    """(start, end, name) in microseconds of what ran on the GPU, by start."""
    return sorted(
        (event.time_range.start, event.time_range.end, event.name)
        for event in events
        if event.device_type == torch.autograd.DeviceType.CUDA and not event.name.startswith(("nccl:", "Optimizer"))
    )
