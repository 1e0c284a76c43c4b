"""Between host and device without waiting: many small arrays up in one copy, results down beside the next step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

_ALIGNMENT = 16


class Staging:
    """Copies of a step's host arrays to a device; on the CPU the arrays themselves.

    On a GPU all arrays of a call lie one behind the other in pinned memory and travel together. PyTorch keeps pinned
    memory for reuse, and hands it out again only when the copies from it are done, so nothing here waits.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._pinned = device.type == "cuda"

    def up(self, *arrays: np.ndarray[Any, Any]) -> list[Tensor]:
        """The arrays as tensors on the device, same shapes and dtypes."""
        if not self._pinned:
            return [torch.from_numpy(array) for array in arrays]
        ends = np.cumsum([-(-array.nbytes // _ALIGNMENT) * _ALIGNMENT for array in arrays]).tolist()
        host = torch.empty(max(ends[-1], 1), dtype=torch.uint8, pin_memory=True)
        memory = host.numpy()
        starts = [0, *ends[:-1]]
        for start, array in zip(starts, arrays, strict=True):
            memory[start : start + array.nbytes].view(array.dtype)[:] = array.ravel()
        there = host.to(self.device, non_blocking=True)
        return [
            there[start : start + array.nbytes].view(_TORCH[array.dtype]).view(array.shape)
            for start, array in zip(starts, arrays, strict=True)
        ]

    def into(self, out: Tensor, array: np.ndarray[Any, Any]) -> None:
        """Overwrites a tensor of the device, contiguous and of the array's size and dtype."""
        if not self._pinned:
            out.copy_(torch.from_numpy(array))
            return
        host = torch.empty(array.shape, dtype=out.dtype, pin_memory=True)
        host.numpy()[...] = array
        out.copy_(host, non_blocking=True)

    def down(self, tensors: Sequence[Tensor]) -> Readback:
        """Starts copying tensors to the host."""
        if not self._pinned:
            return Readback(list(tensors), None)
        copies = [torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True) for tensor in tensors]
        for copy, tensor in zip(copies, tensors, strict=True):
            copy.copy_(tensor, non_blocking=True)
        done = torch.cuda.Event()
        done.record()
        return Readback(copies, done)


class Readback:
    """Tensors on their way to the host."""

    def __init__(self, tensors: list[Tensor], done: torch.cuda.Event | None) -> None:
        self._tensors = tensors
        self._done = done

    def wait(self) -> list[Tensor]:
        """The tensors in the host's memory, as they were when the copy started; waits for nothing launched later."""
        if self._done is not None:
            self._done.synchronize()
        return self._tensors


_TORCH = {np.dtype(name): getattr(torch, name) for name in ("int32", "int64", "float32")}
