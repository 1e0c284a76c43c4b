"""A step of Adam by a kernel against the published formula in float64, and against torch's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from phalanx.ops.triton import adam
from tests.ops.triton import interpreter

interpreter.complete()

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
# Half of the distance to the next number.
ROUNDING = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
SETTINGS: dict[str, Any] = {"betas": (0.9, 0.999), "eps": 1e-8}
GUARD = 64


def formula(row: list[Tensor], step: int, lr: float, weight_decay: float, decoupled: bool) -> list[Tensor]:
    """Parameter and moments after a step, float64."""
    (beta1, beta2), eps = SETTINGS["betas"], SETTINGS["eps"]
    parameter, gradient, mean, square = (tensor.double() for tensor in row)
    if decoupled:
        parameter = parameter - lr * weight_decay * parameter
    else:
        gradient = gradient + weight_decay * parameter
    mean = beta1 * mean + (1 - beta1) * gradient
    square = beta2 * square + (1 - beta2) * gradient**2
    corrected = square / (1 - beta2**step)
    return [parameter - lr * mean / (1 - beta1**step) / (corrected.sqrt() + eps), mean, square]


def guarded(values: Tensor, offset: int = 0) -> tuple[Tensor, Tensor]:
    """The values between 7s, `offset` elements away from where memory is aligned, and all of that memory."""
    memory = torch.full((GUARD + offset + len(values) + GUARD,), 7.0, dtype=values.dtype, device=values.device)
    inside = memory[GUARD + offset : GUARD + offset + len(values)]
    inside.copy_(values)
    return inside, memory


def rows_of(sizes: list[int], dtypes: tuple[torch.dtype, ...], device: torch.device) -> list[list[Tensor]]:
    rows = []
    for size in sizes:
        values = [torch.randn(size, device=device) for _ in range(3)] + [torch.rand(size, device=device)]
        rows.append([value.to(dtype) for value, dtype in zip(values, dtypes, strict=True)])
    return rows


def check(got: Tensor, expected: Tensor, dtype: torch.dtype, fuzz: Tensor | float = 0.0) -> None:
    """Rounded once from what is within 1e-6 of the truth; float16 has no finer steps than 2**-24."""
    allowed = expected.abs() * (1e-6 + (ROUNDING[dtype] if dtype != torch.float32 else 0.0)) + fuzz + 1e-9
    if dtype == torch.float16:
        allowed += 2.0**-25
    assert got.dtype == dtype and ((got.double() - expected).abs() <= allowed).all()


@pytest.mark.parametrize(
    "dtypes",
    [(dtype,) * 4 for dtype in FLOATS]
    + [
        (torch.float32, torch.bfloat16, torch.float32, torch.float32),
        (torch.bfloat16, torch.float32, torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16, torch.float32, torch.float16),
    ],
    ids=lambda dtypes: "-".join(str(dtype).removeprefix("torch.") for dtype in dtypes),
)
@pytest.mark.parametrize("decoupled", [True, False])
def test_the_formula(
    kernel_device: torch.device, dtypes: tuple[torch.dtype, ...], decoupled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sizes around a block, two programs for each tensor, memory that is not aligned; five steps."""
    monkeypatch.setattr(adam, "multiprocessors", lambda device: 1)
    monkeypatch.setattr(adam, "_PROGRAMS", 2)
    monkeypatch.setattr(adam, "_SMALL", 2000)
    sizes = [0, 1, 1023, 1024, 1025, 3071, 5003]
    rows, memories = [], []
    for place, row in enumerate(rows_of(sizes, dtypes, kernel_device)):
        held = [guarded(tensor, offset=place % 2) for tensor in row]
        rows.append([inside for inside, _ in held])
        memories += [memory for _, memory in held]
    for step in range(1, 6):
        lr = 0.1 / step
        expected = [formula(row, step, lr, 0.1, decoupled) for row in rows]
        gradients = [row[1].clone() for row in rows]
        adam.adam_step(rows, step=step, lr=lr, weight_decay=0.1, decoupled=decoupled, **SETTINGS)
        for row, told, gradient in zip(rows, expected, gradients, strict=True):
            assert torch.equal(row[1], gradient)
            # Sums of numbers of opposite sign are as exact as these are.
            check(row[0], told[0], dtypes[0], fuzz=2e-6)
            check(row[2], told[1], dtypes[2], fuzz=1e-6)
            check(row[3], told[2], dtypes[3])
            row[1].copy_(torch.randn(len(row[1])))
    for memory in memories:
        assert (memory[:GUARD] == 7.0).all() and (memory[-GUARD:] == 7.0).all()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam])
def test_torchs_own(kernel_device: torch.device, dtype: torch.dtype, kind: type[torch.optim.Adam]) -> None:
    """torch's in float32 from the same numbers, rounded."""
    for step in range(1, 6):
        row = rows_of([3001], (dtype,) * 4, kernel_device)[0]
        wide = [tensor.to(torch.float32, copy=True) for tensor in row]
        parameter = torch.nn.Parameter(wide[0])
        parameter.grad = wide[1]
        theirs = kind([parameter], lr=0.03 * step, weight_decay=0.1, **SETTINGS)
        theirs.state[parameter] = {"step": torch.tensor(step - 1.0), "exp_avg": wide[2], "exp_avg_sq": wide[3]}
        theirs.step()
        adam.adam_step(
            [row], step=step, lr=0.03 * step, weight_decay=0.1, decoupled=kind is torch.optim.AdamW, **SETTINGS
        )
        check(row[0], parameter.detach().double(), dtype, fuzz=1e-6)
        check(row[2], wide[2].double(), dtype, fuzz=1e-6)
        check(row[3], wide[3].double(), dtype)


def test_small_numbers(kernel_device: torch.device) -> None:
    """Squares that are tiny, rates that float32 would lose beside 1, betas near 1."""
    values = [torch.ones(9), torch.full((9,), 1e-18), torch.zeros(9), torch.zeros(9)]
    row = [value.to(kernel_device) for value in values]
    settings: dict[str, Any] = {"betas": (0.9, 0.99999), "eps": 1e-30}
    adam.adam_step([row], step=1, lr=1e-3, weight_decay=0.0, decoupled=True, **settings)
    torch.testing.assert_close(row[0].cpu(), torch.full((9,), 1 - 1e-3), rtol=1e-4, atol=0.0)
    torch.testing.assert_close(row[2].cpu(), torch.full((9,), 1e-19), rtol=1e-6, atol=0.0)
