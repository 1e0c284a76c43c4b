"""Which of PyTorch's attentions a training step uses."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

_ORDER = (
    (SDPBackend.CUDNN_ATTENTION, torch.backends.cuda.cudnn_sdp_enabled),
    (SDPBackend.FLASH_ATTENTION, torch.backends.cuda.flash_sdp_enabled),
    (SDPBackend.EFFICIENT_ATTENTION, torch.backends.cuda.mem_efficient_sdp_enabled),
    (SDPBackend.MATH, torch.backends.cuda.math_sdp_enabled),
)


def fastest_attention(device: torch.device) -> AbstractContextManager[Any]:
    """Within it, `scaled_dot_product_attention` prefers cuDNN's, which is the fastest on Hopper GPUs, among what is
    enabled; elsewhere nothing changes. What it cannot compute goes to the next one, as always."""
    if device.type != "cuda" or torch.compiler.is_compiling() or torch.cuda.get_device_capability(device) < (9, 0):
        return nullcontext()
    return sdpa_kernel([backend for backend, enabled in _ORDER if enabled()], set_priority=True)
