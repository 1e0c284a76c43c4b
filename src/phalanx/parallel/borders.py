"""Where hidden states cross into and out of the regions of a cut model: whole between them, or cut by tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from phalanx.distributed.group import Group
from phalanx.layout import deal
from phalanx.parallel import overlap, regions
from phalanx.parallel.attention import RegionRandom


class WholeSequence:
    """Between regions, every rank holds all tokens. `overlap`: sums of input gradients travel beside products."""

    def __init__(self, group: Group, overlap: bool = False) -> None:
        self.group = group
        self._overlap = overlap

    def enter(self, x: Tensor) -> Tensor:
        if self._overlap and not torch.compiler.is_compiling():
            # Autograd may have given the same gradient to others, who must not see it summed.
            return overlap.enter(x, lambda x: x, lambda g: self.group.start_all_reduce(g.clone()))
        return regions.copy_in(x, self.group)

    def leave(self, x: Tensor) -> Tensor:
        return regions.sum_out(x, self.group)


class CutSequence:
    """Between the first layer's input and the last layer's output, every rank holds its run of the tokens.

    Hidden states there are [batch, length / ranks, hidden], or [batch x length / ranks, hidden] where a layer has
    flattened them: the order of tokens in a region then is another one, which only layers that treat each token by
    itself may see.
    """

    def __init__(self, group: Group, random: RegionRandom | None, overlap: bool = False) -> None:
        self.group = group
        self._random = random
        self._overlap = overlap
        self._batch = 0
        self._length = 0

    def enter(self, x: Tensor) -> Tensor:
        dim, sizes = self._tokens(x)
        if self._overlap and not torch.compiler.is_compiling():
            group = self.group
            return overlap.enter(
                x, lambda x: group.all_gather(x, dim, sizes), lambda g: group.start_reduce_scatter(g, dim, sizes)
            )
        return regions.gather_in(x, self.group, dim, sizes)

    def leave(self, x: Tensor) -> Tensor:
        return regions.scatter_out(x, self.group, *self._tokens(x))

    def _tokens(self, x: Tensor) -> tuple[int, list[int]]:
        """The dimension of `x` that counts tokens, and every rank's extent of it."""
        sizes = [len(deal(self._length, rank, self.group.size)) for rank in range(self.group.size)]
        return (1, sizes) if x.dim() == 3 else (0, [size * self._batch for size in sizes])

    def before_layers(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Hook before the first layer: cut the hidden states."""
        x = hidden_states(layer, args, kwargs)
        if x.dim() != 3:
            raise ValueError(
                f"sequence parallelism cuts hidden states [batch, length, hidden], but {type(layer).__name__} gets "
                f"{tuple(x.shape)}: switch it off for this model"
            )
        self._batch, self._length = x.shape[:2]
        x = regions.split_in(x, self.group, *self._tokens(x))
        if self._random is not None and layer.training:
            self._random.enter(x.device)
        return with_hidden_states(x, args, kwargs)

    def after_layers(self, layer: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Hook after the last layer: join them."""
        first = output[0] if isinstance(output, tuple) else output
        if self._random is not None and layer.training:
            self._random.leave(first.device)
        joined = regions.gather_out(first, self.group, *self._tokens(first))
        return (joined, *output[1:]) if isinstance(output, tuple) else joined

    def before_attention(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Hook before an attention all of whose readers of the hidden states compute a part: join the tokens."""
        return with_hidden_states(self.enter(hidden_states(block, args, kwargs)), args, kwargs)

    def before_mixed_attention(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The same where some readers compute all of it: their gradients are whole, not parts."""
        x = hidden_states(block, args, kwargs)
        return with_hidden_states(regions.gather_out(x, self.group, *self._tokens(x)), args, kwargs)


def hidden_states(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The hidden states among the arguments of a block's forward."""
    x = kwargs.get("hidden_states", args[0] if args else None)
    if not isinstance(x, Tensor):
        raise ValueError(
            f"{type(module).__name__} is called without hidden states as first or keyword argument `hidden_states`: "
            "its input cannot be cut over the ranks"
        )
    return x


def with_hidden_states(x: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The arguments of a block's forward with other hidden states."""
    if "hidden_states" in kwargs:
        return args, {**kwargs, "hidden_states": x}
    return (x, *args[1:]), kwargs


class ExpertsBorder:
    """The way into a module of all experts, which gets [tokens, hidden] and the router's choice and weights.

    Each rank computes a part of every expert. The router stands outside of the region, so that its gradients, and a
    loss on its logits, are whole on every rank.
    """

    def __init__(self, border: WholeSequence | CutSequence) -> None:
        self._border = border

    def before(self, experts: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tokens = hidden_states(experts, args, kwargs)
        rows = tokens.shape[:-1] if tokens.dim() == 3 else None
        return tuple(self._enter(a, rows) for a in args), {name: self._enter(a, rows) for name, a in kwargs.items()}

    def _enter(self, value: Any, rows: torch.Size | None) -> Any:
        if not isinstance(value, Tensor):
            return value
        if not isinstance(self._border, CutSequence):
            return self._border.enter(value) if torch.is_floating_point(value) else value
        if rows is not None and value.dim() == 2:
            # Where the hidden states are not flattened, the tokens of the rest must come in their order.
            return self._border.enter(value.unflatten(0, rows)).flatten(0, 1)
        return self._border.enter(value)

    def after(self, experts: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        return self._border.leave(output)
