"""The norm of a gradient that lies in parts on many ranks. Every logical element counts once, however many hold it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from phalanx.distributed.mesh import Mesh
from phalanx.training.fragments import Fragment, gradients


class GradientNorm:
    """The 2-norm of the gradients of `fragments` over all ranks of `mesh`.

    `sharded`: the DP ranks own different elements. The result is a float64 number on the device, on all ranks the same
    bits, so that all of them clip alike.
    """

    def __init__(self, fragments: Sequence[Fragment], mesh: Mesh, *, sharded: bool) -> None:
        self._mesh = mesh
        self._sharded = sharded
        self._even = [f for f in fragments if isinstance(f.count, float)]
        self._uneven = [f for f in fragments if not isinstance(f.count, float)]
        weights = [f.count for f in self._even]
        self._weights = torch.tensor(weights, dtype=torch.float64, device=mesh.device)

    @torch.no_grad()
    def __call__(self) -> Tensor:
        total = torch.zeros((), dtype=torch.float64, device=self._mesh.device)
        if self._even:
            norms = torch.stack(torch._foreach_norm(list(gradients(self._even))))
            total += norms.double().square() @ self._weights
        for fragment, gradient in zip(self._uneven, gradients(self._uneven), strict=True):
            total += (gradient.square() * fragment.count).sum(dtype=torch.float64)
        if self._sharded:
            total = self._mesh.dp.all_reduce(total)
        return self._mesh.tp.all_reduce(total).sqrt()


def clip_coefficient(norm: Tensor, limit: float) -> Tensor | float:
    """What gradients of `norm` are multiplied by so that it does not exceed `limit`: the formula of torch's
    `clip_grad_norm_`. A `limit` of 0 means no clipping."""
    if not limit:
        return 1.0
    return (limit / (norm + 1e-6)).clamp(max=1.0)


@torch.no_grad()
def scale_gradients(fragments: Sequence[Fragment], factor: Tensor | float) -> None:
    """Multiply the gradients in place, without reading `factor` on the host."""
    found = list(gradients(fragments))
    if not found or (isinstance(factor, float) and factor == 1):
        return
    torch._foreach_mul_(found, factor.to(found[0].dtype) if isinstance(factor, Tensor) else factor)
