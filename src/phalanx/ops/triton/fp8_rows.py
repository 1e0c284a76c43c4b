"""Rows that the op which made them has quantised already, for the product that reads them.

With quantised projections, what norms and gated activations give goes into a product that would read it once more, to
find each row's largest value. They leave e4m3 numbers and scales beside their output; a product that is given exactly
that tensor takes them, anything else never sees them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor


class Fp8Rows(NamedTuple):
    """numbers e4m3 [rows, k] and scale float32 [rows], as of ``phalanx.ops.quantized.quantize_fp8``."""

    numbers: Tensor
    scale: Tensor


def leave(x: Tensor, rows: Fp8Rows) -> Tensor:
    """`x`, with its rows beside it."""
    beside: Any = x
    beside.fp8_rows = rows
    return x


def left_beside(x: Tensor) -> Fp8Rows | None:
    """What was left beside exactly this tensor."""
    return getattr(x, "fp8_rows", None)


def takes_fp8(device: torch.device, dtype: torch.dtype) -> bool:
    """Where products with e4m3 weights have kernels that read such rows."""
    return device.type == "cuda" and dtype in (torch.bfloat16, torch.float16)
