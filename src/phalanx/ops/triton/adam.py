"""A step of Adam over many tensors by one kernel, which reads and writes each element of them once."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from phalanx.ops.triton.support import multiprocessors

# Eight elements a thread: of 16 bits, 16 bytes.
_BLOCK, _WARPS = 1024, 4
_PROGRAMS = 48  # of each tensor, on each multiprocessor
_SMALL = 1 << 20  # elements: smaller tensors have a launch of their own, without the many programs of large ones

_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}

# parameter, its gradient, exp_avg, exp_avg_sq
Row = tuple[Tensor, Tensor, Tensor, Tensor]


@triton.jit
def _pointer(table, column: tl.constexpr, kind: tl.constexpr, ALIGNED: tl.constexpr):
    pointer = tl.load(table + column).to(tl.pointer_type(kind))
    return tl.multiple_of(pointer, 16) if ALIGNED else pointer


@triton.jit
def _update(parameter, gradient, mean, square, mask, beta1, rest1, beta2, rest2, rate, root, eps, penalty, decay):
    """`mask`: None where all elements are there, so that loads are wide."""
    value = tl.load(parameter, mask=mask).to(tl.float32)
    slope = tl.load(gradient, mask=mask).to(tl.float32) + penalty * value
    m = beta1 * tl.load(mean, mask=mask).to(tl.float32) + rest1 * slope
    v = beta2 * tl.load(square, mask=mask).to(tl.float32) + rest2 * slope * slope
    value -= decay * value
    value -= tl.div_rn(rate * m, tl.sqrt_rn(v) * root + eps)
    tl.store(mean, m.to(mean.dtype.element_ty), mask=mask)
    tl.store(square, v.to(square.dtype.element_ty), mask=mask)
    tl.store(parameter, value.to(parameter.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["programs"])
def _adam(
    table,
    programs,
    beta1,
    rest1,
    beta2,
    rest2,
    rate,
    root,
    eps,
    penalty,
    decay,
    P: tl.constexpr,
    G: tl.constexpr,
    M: tl.constexpr,
    V: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """table: int64 [tensors, 5], four addresses and the number of elements; `programs` share each tensor."""
    program = tl.program_id(0)
    table += (program // programs) * 5
    parameter, gradient = _pointer(table, 0, P, ALIGNED), _pointer(table, 1, G, ALIGNED)
    mean, square = _pointer(table, 2, M, ALIGNED), _pointer(table, 3, V, ALIGNED)
    count = tl.load(table + 4)
    inside = tl.arange(0, BLOCK)
    first, stride = (program % programs).to(tl.int64) * BLOCK, tl.cast(programs, tl.int64) * BLOCK
    whole = count // BLOCK * BLOCK
    for start in range(first, whole, stride):
        at = start + inside
        _update(
            *(parameter + at, gradient + at, mean + at, square + at, None),
            *(beta1, rest1, beta2, rest2, rate, root, eps, penalty, decay),
        )
    # The rest is that of the program whose turn it is.
    if whole < count and whole % stride == first:
        at = whole + inside
        _update(
            *(parameter + at, gradient + at, mean + at, square + at, at < count),
            *(beta1, rest1, beta2, rest2, rate, root, eps, penalty, decay),
        )


def adam_step(
    rows: Iterable[Row],
    *,
    step: float,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    decoupled: bool,
) -> None:
    """A step of Adam in place: of each row `parameter, gradient, exp_avg, exp_avg_sq` all but the gradient change.

    Computed in fp32 and rounded once to the dtype of each:
    `exp_avg = beta1 exp_avg + (1 - beta1) g`, `exp_avg_sq = beta2 exp_avg_sq + (1 - beta2) g^2`,
    `parameter -= lr exp_avg / (1 - beta1^step) / (sqrt(exp_avg_sq / (1 - beta2^step)) + eps)`.

    Args:
        rows: of each parameter four contiguous tensors with as many elements, on one device; each float32, bfloat16 or
            float16. One launch is made for all rows that are alike in this, and in being large or small.
        step: of which number this step is, from 1 on.
        decoupled: whether parameters shrink by `lr * weight_decay` first (AdamW), or their gradients are
            `gradient + weight_decay * parameter` (Adam with an L2 penalty).
    """
    beta1, beta2 = betas
    # In double precision here: a kernel's numbers are float32, in which 1 - beta would be coarse.
    numbers = (
        *(float(beta1), 1.0 - beta1, float(beta2), 1.0 - beta2),
        *(lr / (1.0 - beta1**step), 1.0 / math.sqrt(1.0 - beta2**step), float(eps)),
        *((0.0, float(lr * weight_decay)) if decoupled else (float(weight_decay), 0.0)),
    )
    alike: dict[Any, list[tuple[int, ...]]] = {}
    for parameter, gradient, mean, square in rows:
        addresses = parameter.data_ptr(), gradient.data_ptr(), mean.data_ptr(), square.data_ptr()
        aligned = not (addresses[0] | addresses[1] | addresses[2] | addresses[3]) % 16
        count = parameter.numel()
        key = count < _SMALL, parameter.device, aligned, (parameter.dtype, gradient.dtype, mean.dtype, square.dtype)
        alike.setdefault(key, []).append((*addresses, count))
    for (_, device, aligned, dtypes), found in alike.items():
        most = max(entry[-1] for entry in found)
        if not most:
            continue
        on_gpu = device.type == "cuda"
        table = torch.tensor(found, dtype=torch.int64, pin_memory=on_gpu).to(device, non_blocking=True)
        programs = min(triton.cdiv(most, _BLOCK), _PROGRAMS * multiprocessors(device))
        kinds = [_TYPES[dtype] for dtype in dtypes]
        with torch.cuda.device_of(table):
            _adam[(len(found) * programs,)](
                *(table, programs, *numbers, *kinds, aligned), BLOCK=_BLOCK, num_warps=_WARPS
            )
