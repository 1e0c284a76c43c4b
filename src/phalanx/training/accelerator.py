"""The device of this process under the names of DeepSpeed's `get_accelerator()`."""

from __future__ import annotations

import torch


class Accelerator:
    """CUDA where there is a GPU, else the CPU, whose memory torch does not count: there, bytes are 0.

    `device` is an index, a device, or None for the current one. Memory is in bytes.
    """

    def __init__(self) -> None:
        self._name = "cuda" if torch.cuda.is_available() else "cpu"

    @property
    def _cuda(self) -> bool:
        return self._name == "cuda"

    def is_available(self) -> bool:
        """Whether tensors can be put there."""
        return True

    def device_name(self, device_index: int | None = None) -> str:
        """`"cuda"`, `"cuda:1"`, `"cpu"`."""
        return self._name if device_index is None or not self._cuda else f"cuda:{device_index}"

    def device(self, device_index: int | None = None) -> torch.device:
        """The same as a device."""
        return torch.device(self.device_name(device_index))

    def device_count(self) -> int:
        """GPUs that this process sees; 1 for the CPU."""
        return torch.cuda.device_count() if self._cuda else 1

    def current_device(self) -> int:
        """The index of the current device."""
        return torch.cuda.current_device() if self._cuda else 0

    def current_device_name(self) -> str:
        """`"cuda:0"`, `"cpu"`."""
        return self.device_name(self.current_device())

    def set_device(self, device_index: int) -> None:
        """Make a device the current one."""
        if self._cuda:
            torch.cuda.set_device(device_index)

    def synchronize(self, device: int | None = None) -> None:
        """Return when all that was launched has been done."""
        if self._cuda:
            torch.cuda.synchronize(device)

    def communication_backend_name(self) -> str:
        """`"nccl"` or `"gloo"`."""
        return "nccl" if self._cuda else "gloo"

    def is_bf16_supported(self) -> bool:
        """Whether the device computes in bfloat16."""
        return torch.cuda.is_bf16_supported() if self._cuda else True

    def is_fp16_supported(self) -> bool:
        """Whether the device computes in float16."""
        return True

    def manual_seed(self, seed: int) -> None:
        """Seed the current device's generator."""
        if self._cuda:
            torch.cuda.manual_seed(seed)
        else:
            torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        """Seed the generators of all devices."""
        if self._cuda:
            torch.cuda.manual_seed_all(seed)
        else:
            torch.manual_seed(seed)

    def empty_cache(self) -> None:
        """Give memory that no tensor uses back."""
        if self._cuda:
            torch.cuda.empty_cache()

    def memory_allocated(self, device: int | None = None) -> int:
        """Bytes of tensors."""
        return torch.cuda.memory_allocated(device) if self._cuda else 0

    def max_memory_allocated(self, device: int | None = None) -> int:
        """The most bytes of tensors since the last reset."""
        return torch.cuda.max_memory_allocated(device) if self._cuda else 0

    def memory_reserved(self, device: int | None = None) -> int:
        """Bytes that torch holds."""
        return torch.cuda.memory_reserved(device) if self._cuda else 0

    def max_memory_reserved(self, device: int | None = None) -> int:
        """The most bytes that torch held since the last reset."""
        return torch.cuda.max_memory_reserved(device) if self._cuda else 0

    def reset_peak_memory_stats(self, device: int | None = None) -> None:
        """Start the maxima anew."""
        if self._cuda:
            torch.cuda.reset_peak_memory_stats(device)

    def total_memory(self, device: int | None = None) -> int:
        """Bytes of the device."""
        return (
            torch.cuda.get_device_properties(self.current_device() if device is None else device).total_memory
            if self._cuda
            else 0
        )


def get_accelerator() -> Accelerator:
    """The device of this process."""
    return Accelerator()
