"""The output head and the loss of a causal LM, some tokens at a time, so that no step holds all logits.

In a training forward with labels the head leaves its product to the loss: it returns a tensor of the logits' shape that
takes no memory, and the loss, if it is given exactly this tensor, computes logits of some tokens at a time and keeps a
number of each. The backward computes them again. A model that does something to its logits in between cannot be trained
so, and is refused when it does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from phalanx.distributed.group import Group, SoloGroup
from phalanx.parallel.head import VocabHead, computes_causal_loss, loss_options, wants_loss_only, without_logits
from phalanx.parallel.layers import Cut
from phalanx.parallel.loss import Rows, mean_over_targets, row_gradients, row_losses


def chunk_head(model: nn.Module, tokens: int) -> None:
    """Lets the causal LM in `model`, cut already or of one rank, compute its loss over `tokens` tokens at a time.

    Raises ValueError where it has no linear output head whose logits go into transformers' loss of a causal LM.
    """
    for owner in model.modules():
        find: Any = getattr(owner, "get_output_embeddings", None)
        head = None if find is None else find()
        if isinstance(head, nn.Linear) and _goes_into_the_loss(owner, head):
            ChunkedHead(owner, head, tokens)
            return
    raise ValueError(
        f"chunked_head: {type(model).__name__} has no plain linear output head whose logits go into transformers' loss "
        "of a causal LM; switch it off"
    )


def _goes_into_the_loss(owner: Any, head: nn.Module) -> bool:
    cut_head = getattr(getattr(owner, "loss_function", None), "__self__", None)
    if isinstance(cut_head, VocabHead):
        return cut_head.only_layer is head
    return computes_causal_loss(owner)


class ChunkedHead:
    """One head, and the loss behind it.

    Args:
        owner: the causal LM.
        head: its output head.
        tokens: how many of them have logits at a time.
    """

    def __init__(self, owner: Any, head: nn.Linear, tokens: int) -> None:
        self._head = head
        self._tokens = tokens
        self._whole_loss = owner.loss_function
        cut: Cut | None = getattr(head, "cut", None)
        self._entry: Callable[[Tensor], Tensor] = (lambda x: x) if cut is None or cut.entry is None else cut.entry
        self._group: Group = SoloGroup() if cut is None else cut.group
        self._vocab = range(head.out_features) if cut is None else cut.vocab
        self._vocab_size = head.out_features if cut is None else sum(cut.sizes)
        self._active = False
        self._input: Tensor | None = None
        self._stand_in: Tensor | None = None
        own = type(head)
        head.__class__ = type(f"Chunked[{own.__name__}]", (_LeavesItToTheLoss, own), {"__module__": own.__module__})
        head.chunked = self  # type: ignore[assignment]
        owner.loss_function = self.loss
        owner.register_forward_pre_hook(self._before, with_kwargs=True)
        owner.register_forward_hook(self._after)

    def _before(self, owner: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._active = wants_loss_only(owner, kwargs) and not torch.compiler.is_compiling()

    def project(self, x: Tensor, otherwise: Callable[[Tensor], Tensor]) -> Tensor:
        """What the head's forward returns for x [..., in]."""
        if not self._active:
            return otherwise(x)
        self._input = self._entry(x)
        self._stand_in = x.new_full((), torch.nan).expand(*x.shape[:-1], len(self._vocab))
        return self._stand_in

    def loss(self, logits: Tensor, labels: Tensor | None = None, vocab_size: int = 0, **kwargs: Any) -> Any:
        """In place of the model's loss function."""
        if not self._active:
            return self._whole_loss(logits, labels, vocab_size, **kwargs)
        x, stand_in = self._input, self._stand_in
        self._input = self._stand_in = None
        if x is None or logits is not stand_in:
            raise ValueError(
                "chunked_head: this model changes its logits between its output head and its loss, so they cannot be "
                "computed in parts; switch chunked_head off"
            )
        options = loss_options(kwargs)
        what = self._vocab, self._vocab_size, self._group, options.get("ignore_index", -100)
        rows = x.reshape(-1, x.shape[-1])

        def losses(target: Tensor) -> Tensor:
            found: Tensor = _HeadLoss.apply(
                rows, self._head.weight, self._head.bias, target.to(x.device), what, self._tokens
            )
            return found

        return mean_over_targets(losses, labels, **options)

    def _after(self, owner: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        self._input = self._stand_in = None
        return without_logits(output) if self._active else None


class _LeavesItToTheLoss(nn.Module):
    chunked: ChunkedHead

    def forward(self, x: Tensor) -> Tensor:
        return self.chunked.project(x, super().forward)


class _HeadLoss(torch.autograd.Function):
    """The loss of each row of x [N, in], [N], by the logits x @ weight.T + bias of some rows at a time."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, what: Any, tokens: int
    ) -> Tensor:
        parts = zip(x.split(tokens), target.split(tokens), strict=True)
        losses, rows = zip(*(row_losses(F.linear(part, weight, bias), t, *what) for part, t in parts), strict=True)
        ctx.save_for_backward(x, weight, bias, *(torch.cat(field) for field in zip(*rows, strict=True)))
        ctx.tokens = tokens
        return torch.cat(losses)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> Any:
        x, weight, bias, *fields = ctx.saved_tensors
        of_x, of_weight, of_bias, *_ = ctx.needs_input_grad
        wide = torch.promote_types(weight.dtype, torch.float32)
        dx = torch.empty_like(x) if of_x else None
        # Of many small sums: in few bits, each addition would round.
        dweight = torch.zeros(weight.shape, dtype=wide, device=weight.device) if of_weight else None
        dbias = torch.zeros(weight.shape[0], dtype=wide, device=weight.device) if of_bias else None
        for start in range(0, len(x), ctx.tokens):
            here = slice(start, start + ctx.tokens)
            part = x[here]
            slope = row_gradients(F.linear(part, weight, bias), Rows(*(field[here] for field in fields)), g[here])
            if dx is not None:
                dx[here] = slope @ weight
            if dweight is not None:
                dweight += _product(slope.t(), part, wide)
            if dbias is not None:
                dbias += slope.sum(0, dtype=wide)
        return (
            dx,
            None if dweight is None else dweight.to(weight.dtype),
            None if dbias is None else dbias.to(weight.dtype),
            None,
            None,
            None,
        )


def _product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """a @ b in a wider dtype."""
    if a.is_cuda and a.dtype != dtype:
        return torch.mm(a, b, out_dtype=dtype)
    return a.to(dtype) @ b.to(dtype)
