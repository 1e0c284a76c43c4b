"""When a GPU has nothing to do, by a profile."""

from __future__ import annotations

from typing import Any

import torch


def idle_times(events: Any, steps: int, longest: int = 12) -> list[dict[str, Any]]:
    """The times in which no kernel runs: all of them, and the longest with what ran before and after."""
    kernels = sorted(
        (
            (event.time_range.start, event.time_range.end, event.name)
            for event in events
            if event.device_type == torch.autograd.DeviceType.CUDA and not event.name.startswith(("nccl:", "Optimizer"))
        ),
    )
    found = []
    busy_until, last = (kernels[0][1], kernels[0][2]) if kernels else (0, "")
    for start, end, name in kernels:
        if start > busy_until:
            found.append({"name": f"idle: {last[:40]} ... {name[:40]}", "ms": (start - busy_until) / 1e3, "calls": 1})
        if end > busy_until:
            busy_until, last = end, name
    whole = {"name": "idle", "ms": sum(each["ms"] for each in found) / steps, "calls": len(found) / steps}
    return [whole, *sorted(found, key=lambda each: -each["ms"])[:longest]] if found else []
