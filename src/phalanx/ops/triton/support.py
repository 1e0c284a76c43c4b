"""Which tensors the kernels are for, and what the device offers them."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from phalanx.ops.linear import PreparedWeight


def on_gpu(device: torch.device, dtype: torch.dtype) -> bool:
    """CUDA tensors of the usual floating dtypes."""
    return device.type == "cuda" and dtype in (torch.float32, torch.bfloat16, torch.float16)


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Of a GPU; of an H200 where kernels are interpreted."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


@functools.cache
def launches_early(device: torch.device) -> bool:
    """Whether a kernel can be started before the one ahead of it has ended (programmatic dependent launch)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def early_launch(device: torch.device) -> dict[str, Any]:
    """The arguments of a launch whose kernel takes a constant PDL: it may start before the one ahead has ended, waits
    for it before it reads anything, and lets the one behind start as early."""
    return {"PDL": True, "launch_pdl": True} if launches_early(device) else {"PDL": False}


def dense_rows(x: Tensor, weight: PreparedWeight) -> Tensor:
    """x as [rows, in] with dense rows. ValueError for another number of inputs than the weight's."""
    if x.shape[-1] != weight.in_features or x.dtype != weight.dtype:
        raise ValueError(
            f"linear: the weight takes [..., {weight.in_features}] of {weight.dtype}; "
            f"x is {tuple(x.shape)} of {x.dtype}"
        )
    rows = x if x.dim() == 2 else x.reshape(x.shape[:-1].numel(), x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()
