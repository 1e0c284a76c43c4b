"""FlashAttention 3 over the blocked KV cache, where the module `flash_attn_interface` is installed on a Hopper GPU."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from importlib.util import find_spec

import torch
from torch import Tensor

from phalanx.ops import registry

HEAD_SIZES = (64, 128, 256)


def attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    cu_seqlens_q: Tensor,
    seq_lens: Tensor,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    max_query_len: int,
    max_seq_len: int,
) -> Tensor:
    """See `phalanx.ops.attention.paged_attention`.

    Raises:
        ValueError: a soft cap, or a head size other than 64, 128 and 256.
    """
    if soft_cap is not None:
        raise ValueError("the attention 'fa3' has no soft cap; choose another implementation")
    if q.shape[2] not in HEAD_SIZES:
        raise ValueError(f"the attention 'fa3' takes heads of 64, 128 or 256; got {q.shape[2]}; choose another one")
    if q.numel() == 0 or seq_lens.shape[0] == 0 or max_query_len == 0:
        return torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    out: Tensor = _kernel()(
        q if q.stride(2) == 1 else q.contiguous(),
        k_cache,
        v_cache,
        page_table=block_table,
        cache_seqlens=seq_lens,
        cu_seqlens_q=cu_seqlens_q,
        max_seqlen_q=max_query_len,
        softmax_scale=scale,
        causal=True,
        window_size=(-1, -1) if window is None else (window - 1, 0),
    )
    # It leaves padding rows as they were allocated.
    padding = torch.arange(q.shape[0], device=q.device) >= cu_seqlens_q[-1]
    return out.masked_fill_(padding[:, None, None], 0)


@functools.cache
def _kernel() -> Callable[..., Tensor]:
    # Imported at the first use: it loads a library of hundreds of megabytes.
    function: Callable[..., Tensor] = importlib.import_module("flash_attn_interface").flash_attn_with_kvcache
    return function


def supports(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether it can run tensors of this dtype on this device: half precision on a Hopper GPU."""
    halves = (torch.bfloat16, torch.float16)
    return device.type == "cuda" and dtype in halves and torch.cuda.get_device_capability(device)[0] == 9


if find_spec("flash_attn_interface") is not None:
    registry.register("attention", "fa3", attention, supports=supports, priority=2)
