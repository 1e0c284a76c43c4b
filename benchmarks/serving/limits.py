"""What the GPU can do, measured in the same run, and from it the least time that a step can take."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from statistics import median

import torch


@dataclass(frozen=True)
class Limits:
    """Bytes a second of reading (half of a device copy's traffic is writes, and counts too), and FLOP/s of bf16."""

    read: float
    matmul: float


def measure() -> Limits:
    """A copy of 4 GB and a bf16 product of 8192^3, each the median of several, on random data."""
    source = torch.randn(1 << 30, device="cuda")
    target = torch.empty_like(source)
    read = 2 * source.nbytes / _seconds(partial(target.copy_, source))
    del source, target
    n = 8192
    a, b = (torch.randn(n, n, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    matmul = 2 * n**3 / _seconds(lambda: a @ b)
    return Limits(read, matmul)


def _seconds(work: object, repeats: int = 9) -> float:
    times = []
    for _ in range(repeats + 2):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()  # type: ignore[operator]
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return median(times[2:])


@dataclass(frozen=True)
class Costs:
    """What a token costs on one rank: parameters of the layers and of the head, KV bytes, and attention FLOPs for each
    key that a query sees."""

    layer_parameters: int
    head_parameters: int
    bytes_per_parameter: float
    kv_bytes: int
    attention_flops: int


@dataclass(frozen=True)
class StepShape:
    """One launched step: its tokens, rows of logits, cached keys that are read, and query-key pairs of prompts."""

    tokens: int
    logits: int
    keys_read: int
    prompt_pairs: int


def least_seconds(step: StepShape, costs: Costs, limits: Limits) -> float:
    """Products at the matmul rate or the weights' reading time, whichever is longer; then the KV; nothing overlaps."""
    products = max(
        costs.layer_parameters * costs.bytes_per_parameter / limits.read,
        2 * costs.layer_parameters * step.tokens / limits.matmul,
    )
    head = max(
        costs.head_parameters * costs.bytes_per_parameter / limits.read,
        2 * costs.head_parameters * step.logits / limits.matmul,
    )
    kv = step.keys_read * costs.kv_bytes / limits.read
    return products + head + kv + step.prompt_pairs * costs.attention_flops / limits.matmul
