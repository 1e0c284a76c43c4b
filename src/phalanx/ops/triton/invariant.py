"""Linear layers whose result for a row never depends on the rows beside it, nor on how many ranks share K.

One kernel with one tile makes every product, whatever the number of rows. K is cut into 8 equal leaves; each is added
up by itself in float32, then the leaves as a binary tree. A rank of 2, 4 or 8 that holds an equal share of K holds
whole leaves, a subtree: the sums of the ranks, added up as the rest of the tree and rounded once, are the same numbers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from phalanx.ops import registry
from phalanx.ops.linear import PlainLinear, PreparedWeight
from phalanx.ops.triton.support import on_gpu

LEAVES = 8
"""Parts of K that are added up apart; tensor parallelism over a number of ranks that divides it changes no sum."""

# Rows, columns and K of a step, by the size of an element: never by the shapes of a call.
BLOCK_M, BLOCK_N = 64, 64
BLOCK_K = {2: 64, 4: 16}


@triton.jit
def leaf(x_at, w_at, first, last, real, inner, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """The sum over K from `first` to `last`, [BLOCK_M, BLOCK_N] in float32."""
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in tl.range(first, last, BLOCK_K):
        valid = start + inner < last
        a = tl.load(x_at + start, mask=real[:, None] & valid[None, :], other=0.0)
        b = tl.load(w_at + start, mask=valid[:, None], other=0.0)
        acc = tl.dot(a, b, acc, input_precision="ieee")
    return acc


@triton.jit(do_not_specialize=("m",))
def invariant_kernel(
    x, w, bias, y, m, n, length, x_stride, w_stride,
    LEAVES: tl.constexpr, BIASED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """x [m, LEAVES * length] -> y [m, n], dense; grid (cdiv(n, BLOCK_N), cdiv(m, BLOCK_M))."""
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = columns < n
    rows = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    real = rows < m
    inner = tl.arange(0, BLOCK_K)
    x_at = x + rows.to(tl.int64)[:, None] * x_stride + inner[None, :]
    w_at = w + tl.minimum(columns, n - 1).to(tl.int64)[None, :] * w_stride + inner[:, None]
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    half = total
    quarter = total
    # A subtree is whole when its last leaf is: 1 joins 0, 3 joins 2 and then both join 0 and 1, and so on.
    for place in tl.range(LEAVES, num_stages=1):
        sum_ = leaf(x_at, w_at, place * length, (place + 1) * length, real, inner, BLOCK_M, BLOCK_N, BLOCK_K)
        if place % 2 == 1:
            sum_ = quarter + sum_
        else:
            quarter = sum_
        if place % 4 == 3:
            sum_ = half + sum_
        elif place % 4 == 1:
            half = sum_
        if place == LEAVES - 1 and LEAVES == 8:
            total += sum_
        elif LEAVES < 8 or place == 3:
            total = sum_
    if BIASED:
        # Rounded before the bias is added, as where the sum comes from several ranks.
        total = total.to(y.dtype.element_ty).to(tl.float32)
        total += tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)[None, :]
    y_at = y + rows.to(tl.int64)[:, None] * n + columns[None, :]
    tl.store(y_at, total.to(y.dtype.element_ty), mask=real[:, None] & inside[None, :])


def product(x: Tensor, weight: Tensor, bias: Tensor | None, leaves: int, dtype: torch.dtype) -> Tensor:
    """x [..., in] and weight [out, in], rows dense -> [..., out] of `dtype`, K cut into `leaves` equal leaves."""
    n, k = weight.shape
    if x.shape[-1] != k or x.dtype != weight.dtype:
        raise ValueError(f"linear: the weight takes [..., {k}] of {weight.dtype}; x is {tuple(x.shape)} of {x.dtype}")
    rows = x if x.dim() == 2 else x.reshape(x.shape[:-1].numel(), k)
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    count = rows.shape[0]
    out = torch.empty((*x.shape[:-1], n), dtype=dtype, device=x.device)
    if out.numel():
        invariant_kernel[triton.cdiv(n, BLOCK_N), triton.cdiv(count, BLOCK_M)](
            rows, weight, out if bias is None else bias, out, count, n, k // leaves, rows.stride(0), weight.stride(0),
            LEAVES=leaves, BIASED=bias is not None, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N,
            BLOCK_K=BLOCK_K[x.element_size()], num_warps=4, num_stages=4 if x.element_size() == 2 else 2,
        )  # fmt: skip
    return out


def leaves_of(in_features: int) -> int:
    """The leaves of a whole K: 8 where that divides it, else 1."""
    return LEAVES if in_features % LEAVES == 0 else 1


def partial(x: Tensor, weight: PreparedWeight, ranks: int) -> Tensor:
    """This rank's part of a product whose K is shared by `ranks` in equal parts, not rounded.

    Args:
        x: [..., in of this rank].
        weight: [out, in of this rank] in the layout "plain".
        ranks: 1, 2, 4 or 8.

    Returns:
        float32 [..., out]; `tree_sum` of all ranks' parts in the order of the ranks, rounded once, equals `linear` with
        the whole weight.

    Raises:
        ValueError: another number of ranks, or a part of K that is not whole leaves.
    """
    if ranks not in (1, 2, 4, 8):
        raise ValueError(f"batch-invariant sums are over 1, 2, 4 or 8 ranks; given {ranks}")
    leaves = LEAVES // ranks if leaves_of(weight.in_features * ranks) == LEAVES else 1
    if ranks > 1 and (weight.in_features * ranks) % LEAVES:
        raise ValueError(
            f"batch-invariant sums over {ranks} ranks need inputs that {LEAVES} divides; "
            f"this weight has {weight.in_features} on a rank"
        )
    return product(x, weight.data, None, leaves, torch.float32)


def tree_sum(parts: Tensor) -> Tensor:
    """parts [ranks, ...] of a power of two ranks -> their sum as a binary tree of neighbours."""
    while parts.shape[0] > 1:
        parts = parts[0::2] + parts[1::2]
    return parts[0]


class InvariantLinear(PlainLinear):
    """The weight as it is; a row's result is the same whatever rows stand beside it."""

    layout = "plain"
    part = staticmethod(partial)
    join = staticmethod(tree_sum)

    def apply(self, x: Tensor, weight: PreparedWeight, bias: Tensor | None) -> Tensor:
        return product(x, weight.data, bias, leaves_of(weight.in_features), weight.dtype)


# Below 0: slower than the others, so only by name.
registry.register("linear", "invariant", InvariantLinear(), supports=on_gpu, priority=-5)
