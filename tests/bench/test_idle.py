"""What a profile says of a GPU's time."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from benchmarks.idle import idle_times, times_alone


def ran(name: str, start: float, end: float) -> SimpleNamespace:
    cuda = torch.autograd.DeviceType.CUDA
    return SimpleNamespace(name=name, device_type=cuda, time_range=SimpleNamespace(start=start, end=end))


def test_times_alone_and_idle_ones_add_up_to_the_whole() -> None:
    events = [
        ran("product", 0, 10),
        ran("norm", 4, 13),  # waits from 4 to 10
        ran("short", 5, 6),  # wholly beside the product
        ran("product", 20, 27),
        ran("nccl:all_reduce", 0, 100),  # a mark, not a kernel
        SimpleNamespace(name="host", device_type=torch.autograd.DeviceType.CPU, time_range=None),
    ]
    assert times_alone(events, 2) == {"product": 8.5, "norm": 1.5}
    idle = idle_times(events, 2)
    assert idle[0] == {"name": "idle", "ms": 0.0035, "calls": 0.5}
    assert idle[1]["name"] == "idle: norm ... product"
