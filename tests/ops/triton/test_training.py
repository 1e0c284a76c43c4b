"""The kernels of a training step against autograd of the plain formulas."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from phalanx.distributed.group import SoloGroup
from phalanx.ops.triton import training
from phalanx.parallel.loss import vocab_parallel_cross_entropy
from tests.ops.triton import interpreter

interpreter.complete()

DTYPES = [torch.float32, torch.bfloat16]


def close(got: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    """`expected` is float32: of a bfloat16 result two roundings are allowed, 2**-8 each at most."""
    tolerance = 1e-5 if got.dtype == torch.float32 else 1e-2
    assert got.dtype == dtype and got.shape == expected.shape
    assert (got.float() - expected).norm() <= tolerance * expected.norm() + 1e-12


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(1, 7), (5, 48), (700, 33), (3, 1000)])
def test_rms_norm(kernel_device: torch.device, dtype: torch.dtype, rows: int, width: int) -> None:
    x, g = (torch.randn(rows, width, device=kernel_device).to(dtype) for _ in range(2))
    weight = torch.rand(width, device=kernel_device).to(dtype) + 0.5
    wide_x, wide_weight = (t.float().requires_grad_() for t in (x, weight))
    normed = wide_x * torch.rsqrt(wide_x.square().mean(-1, keepdim=True) + 1e-6)
    expected = normed * wide_weight
    expected.backward(g.float())
    y, rstd = training.rms_norm_forward(x, weight, 1e-6)
    close(y, expected.detach(), dtype)
    dx, dweight = training.rms_norm_backward(x, weight, rstd, g)
    assert wide_x.grad is not None and wide_weight.grad is not None
    close(dx, wide_x.grad, dtype)
    close(dweight, wide_weight.grad, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (7, 300), (2, 2049)])
def test_gated_silu(kernel_device: torch.device, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    gate, up, g = (torch.randn(shape, device=kernel_device).to(dtype) for _ in range(3))
    wide_gate, wide_up = gate.float().requires_grad_(), up.float().requires_grad_()
    expected = F.silu(wide_gate) * wide_up
    expected.backward(g.float())
    close(training.silu_mul_forward(gate, up), expected.detach(), dtype)
    dgate, dup = training.silu_mul_backward(gate, up, g)
    assert wide_gate.grad is not None and wide_up.grad is not None
    close(dgate, wide_gate.grad, dtype)
    close(dup, wide_up.grad, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [3, 4096, 5001])
def test_cross_entropy(
    kernel_device: torch.device, dtype: torch.dtype, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loss with its kernels, at one rank, against PyTorch's."""
    monkeypatch.setattr("phalanx.parallel.loss._kernels_for", lambda logits: training)
    logits = (3 * torch.randn(6, width, device=kernel_device)).to(dtype)
    logits[1, : width // 2] = float("-inf")
    target = torch.randint(width // 2, width, (6,), device=kernel_device)
    target[4] = -100
    mine, theirs = logits.clone().requires_grad_(), logits.float().requires_grad_()
    loss = vocab_parallel_cross_entropy(mine, target, range(width), width, SoloGroup())
    expected = F.cross_entropy(theirs, target, reduction="none")
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
    weights = torch.rand(6, device=kernel_device)
    (loss * weights).sum().backward()
    (expected * weights).sum().backward()
    assert mine.grad is not None and theirs.grad is not None
    close(mine.grad, theirs.grad, dtype)


def test_a_vocabulary_in_two_parts(kernel_device: torch.device) -> None:
    logits = torch.randn(4, 10, device=kernel_device)
    sums = [training.row_sums(part.contiguous()) for part in logits.split([3, 7], 1)]
    largest = torch.maximum(sums[0][0], sums[1][0])
    total = sum(total * (own - largest).exp() for own, total in sums)
    torch.testing.assert_close(largest + total.log(), logits.logsumexp(-1))
