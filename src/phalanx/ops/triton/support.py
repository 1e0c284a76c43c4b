"""Which tensors the kernels are for."""

from __future__ import annotations

import torch


def on_gpu(device: torch.device, dtype: torch.dtype) -> bool:
    """CUDA tensors of the usual floating dtypes."""
    return device.type == "cuda" and dtype in (torch.float32, torch.bfloat16, torch.float16)
