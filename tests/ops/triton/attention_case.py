"""Random ragged batches over a blocked KV cache, with NaN wherever nobody may look."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from phalanx.ops.attention import reference_attention
from tests.ops.triton import interpreter

interpreter.complete()


def ragged(
    sizes: Sequence[tuple[int, int]],
    heads: int,
    kv_heads: int,
    head_size: int,
    *,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    cache_dtype: torch.dtype | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    biased: bool = False,
    padding: int = 0,
    bound: int = 0,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> dict[str, Any]:
    """Arguments of `paged_attention` for sequences of (new, old) tokens and rows of padding behind them.

    Slots that no new token sees hold NaN, table entries that are not read lead far outside, q and the caches are
    strided as in the engine, and `max_seq_len` exceeds the longest context by `bound`.
    """
    random = torch.Generator().manual_seed(seed)
    cache_dtype = cache_dtype or dtype
    needed = [-(-(new + old) // block_size) for new, old in sizes]
    order = torch.randperm(sum(needed) + 1, generator=random).tolist()
    pool = torch.full((len(order), 2, 2, block_size, kv_heads, head_size), float("nan"))
    k_cache, v_cache = pool[:, 1].unbind(1)
    table = torch.full((len(sizes), max([*needed, 1]) + 1), 1 << 30, dtype=torch.int32)
    for s, (new, old) in enumerate(sizes):
        own = [order.pop() for _ in range(needed[s])]
        begin = 0 if window is None or not new else max(0, old - window + 1)
        for position in range(begin if new else new + old, new + old):
            block = table[s, position // block_size] = own[position // block_size]
            k_cache[block, position % block_size] = torch.randn(kv_heads, head_size, generator=random)
            v_cache[block, position % block_size] = torch.randn(kv_heads, head_size, generator=random)
    tokens = sum(new for new, _ in sizes)
    wide = torch.randn(tokens + padding, heads + 2 * kv_heads, head_size, generator=random)
    wide[tokens:] = float("nan")
    pool = pool.to(cache_dtype).to(device)
    k_cache, v_cache = pool[:, 1].unbind(1)
    longest = max([new + old for new, old in sizes] or [0])
    arguments: dict[str, Any] = {
        "q": wide.to(dtype).to(device)[:, :heads],
        "k_cache": k_cache,
        "v_cache": v_cache,
        "block_table": table.to(device),
        "cu_seqlens_q": torch.tensor([0] + [new for new, _ in sizes]).cumsum(0).to(torch.int32).to(device),
        "seq_lens": torch.tensor([new + old for new, old in sizes], dtype=torch.int32, device=device),
        "scale": head_size**-0.5,
        "window": window,
        "soft_cap": soft_cap,
        "max_query_len": max([new for new, _ in sizes] or [0]),
        "max_seq_len": longest + bound,
    }
    if biased:
        arguments["key_bias"] = torch.randn(heads, max(longest, 1), generator=random).to(device)
    return arguments


def exact(arguments: dict[str, Any]) -> Tensor:
    """The reference in float64."""
    moved = dict(arguments)
    for name in ("q", "k_cache", "v_cache"):
        moved[name] = moved[name].to(torch.float32).to(torch.float64)
    moved["block_table"] = moved["block_table"].clamp_max(moved["k_cache"].shape[0] - 1)
    return reference_attention(**moved)


def relative_error(found: Tensor, wanted: Tensor) -> float:
    """Of the whole, by the Euclidean norm; NaN where anything is NaN."""
    return float((found.double() - wanted).norm() / wanted.norm().clamp_min(1e-30))


def check_written(attention: Callable[..., Tensor], arguments: dict[str, Any]) -> Tensor:
    """The output, made in the middle of a poisoned buffer: all of it was written, and nothing around it."""
    margin, buffers = 4096, []

    def poisoned(shape: Sequence[int] | int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        size = math.prod(shape) if isinstance(shape, tuple) else shape
        whole = torch.full((size + 2 * margin,), float("nan"), dtype=dtype, device=device)
        buffers.append((whole, size))
        return whole[margin : margin + size].view(shape)

    with mock.patch.object(torch, "empty", poisoned):
        found = attention(**arguments)
    for whole, size in buffers:
        around = torch.cat([whole[:margin], whole[margin + size :]])
        if not around.isnan().all():
            raise AssertionError("something beyond an output or a workspace was written")
    if found.isnan().any():
        raise AssertionError(f"{int(found.isnan().sum())} of {found.numel()} outputs were not written, or are NaN")
    return found
