"""Triton kernels run on the GPU where there is one, else under Triton's interpreter on the CPU."""

from __future__ import annotations

import pytest
import torch

# Before any module that defines kernels; TRITON_INTERPRET is set by the conftest above.
pytest.importorskip("triton", reason="triton is not installed")


@pytest.fixture(scope="session")
def kernel_device() -> torch.device:
    """Where the tensors of a kernel's test lie."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
