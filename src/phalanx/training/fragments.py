"""What one rank updates: fragments of parameters, plain tensors that any elementwise optimizer can hold."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from phalanx.parallel.registry import LayoutRegistry


@dataclass(frozen=True, eq=False)
class Fragment:
    """Elements `start` to `stop` of the flattened local shard of one parameter, of which this rank is the owner.

    `tensor` holds their master values (fp32 where the model computes in 16 bits; the parameter's own memory where it
    does not) and, from `GradientShards.finish` on, their gradient in `tensor.grad`. It has the shape of the shard
    where DP ranks do not share the work, else one dimension. `count` says how much each element weighs in a sum over
    all owners: over the TP ranks that hold copies of an element the weights add up to 1. It is one number, or a tensor
    of the shape of `tensor` where elements differ.
    """

    name: str
    start: int
    stop: int
    tensor: nn.Parameter
    count: float | Tensor


class GradientShards(Protocol):
    """The gradients of a model on their way to the optimizer. A step calls these in this order, on all ranks alike."""

    fragments: list[Fragment]
    scale: float
    """The factor from what lies in `tensor.grad` to the mean over the DP ranks."""
    sharded: bool
    """Whether each DP rank owns its own elements; if not, all of them own all elements."""

    def begin(self, *, reduce: bool) -> None:
        """A backward pass begins. `reduce`: it is the last of this step, so the sums over DP ranks may start."""

    def end(self) -> None:
        """The backward pass is over."""

    def finish(self) -> None:
        """Every fragment's `tensor.grad` is there: summed over the passes, DP ranks and, where partial, TP ranks. A
        parameter that no pass has used has a gradient of zeros."""

    def publish(self) -> None:
        """The updated master values go to the parameters of the model, on all ranks."""

    def whole(self, state: dict[str, Any]) -> dict[str, Any]:
        """A state dict of the module with every tensor whole over the DP ranks."""

    def discard(self) -> None:
        """Forget all gradients."""

    def destroy(self) -> None:
        """Take the hooks off the model and let all buffers go."""


def count_weights(registry: LayoutRegistry, name: str, shape: Sequence[int], device: torch.device) -> float | Tensor:
    """How much each element of the local shard `shape` weighs: one number where all weigh the same, else a tensor."""
    boxes = registry.count_once(name)
    weights = {weight for _, weight in boxes}
    if len(weights) <= 1:
        return weights.pop() if weights else 1.0
    out = torch.empty(tuple(shape), dtype=torch.float32, device=device)
    for box, weight in boxes:
        out[box] = weight
    return out


def cut_weights(count: float | Tensor, start: int, stop: int, shape: Sequence[int]) -> float | Tensor:
    """The weights of elements `start` to `stop` of a flattened shard, in the shape of a fragment."""
    return count if isinstance(count, float) else count.flatten()[start:stop].reshape(tuple(shape))


def trained_parameters(
    module: nn.Module, optimizer: torch.optim.Optimizer, registry: LayoutRegistry
) -> dict[str, nn.Parameter]:
    """The parameters that `optimizer` holds and that want a gradient, by name, in the order of the module.

    Raises ValueError for an optimizer that holds tensors which are no parameters of the module, and for parameters
    whose shape is not the registry's.
    """
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    named = dict(module.named_parameters())
    foreign = held - {id(parameter) for parameter in named.values()}
    if foreign:
        raise ValueError(
            f"the optimizer holds {len(foreign)} of {len(held)} tensors that are not parameters of the model: build it "
            "from model.parameters() of this very model (a parameter that was replaced since is another tensor)"
        )
    trained = {name: p for name, p in named.items() if id(p) in held and p.requires_grad}
    if not trained:
        raise ValueError("the optimizer holds no parameter that requires a gradient: there is nothing to train")
    for name, parameter in trained.items():
        if tuple(parameter.shape) != registry.local_shape(name):
            raise ValueError(
                f"{name} has shape {tuple(parameter.shape)}, but the layout registry says "
                f"{registry.local_shape(name)}: pass the registry that parallelize() returned for this model"
            )
    return trained


def by_parameter(fragments: Sequence[Fragment]) -> Mapping[str, list[Fragment]]:
    """The fragments of each parameter."""
    found: dict[str, list[Fragment]] = {}
    for fragment in fragments:
        found.setdefault(fragment.name, []).append(fragment)
    return found


def gradients(fragments: Sequence[Fragment]) -> Iterator[Tensor]:
    """The gradients that `finish` has put there."""
    for fragment in fragments:
        if fragment.tensor.grad is None:
            raise RuntimeError(f"the gradient of {fragment.name} is not there: finish() comes first")
        yield fragment.tensor.grad
