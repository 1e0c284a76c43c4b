"""Cross entropy over logits whose vocabulary is cut over the ranks: no rank ever holds a whole row."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from phalanx.distributed.group import Group

# Logits that are held in fp32 at once: they come in the model's dtype, and their exponentials would double or
# quadruple the memory of the largest activation of a step.
_ELEMENTS_AT_ONCE = 1 << 24


def vocab_parallel_cross_entropy(
    logits: Tensor, target: Tensor, vocab: range, vocab_size: int, group: Group, ignore_index: int = -100
) -> Tensor:
    """The negative log-likelihood of every target, fp32 [N] (float64 for float64 logits), 0 where it is ignored.

    Args:
        logits: [N, len(vocab)] of this rank's token ids `vocab`, any floating dtype. Computed with in fp32.
        target: [N] int64 token ids, the same on all ranks. An id outside of `vocab_size` is an error on all of them, as
            in PyTorch: an IndexError on the CPU, an assertion of the device on a GPU.
    """
    loss: Tensor = _CrossEntropy.apply(logits, target, vocab, vocab_size, group, ignore_index)
    return loss


class Rows(NamedTuple):
    """What the gradient of a row's loss needs besides its logits: `log_sum` of all their exponentials, the target's
    `column` in this rank's share where it is `mine`, and whether it is `counted`."""

    log_sum: Tensor
    column: Tensor
    mine: Tensor
    counted: Tensor


def row_losses(
    logits: Tensor, target: Tensor, vocab: range, vocab_size: int, group: Group, ignore_index: int
) -> tuple[Tensor, Rows]:
    """`vocab_parallel_cross_entropy` without autograd, and what `row_gradients` needs."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    counted = target != ignore_index
    mine = counted & (target >= vocab.start) & (target < vocab.stop)
    column = torch.where(mine, target - vocab.start, 0)
    # What no rank has is looked up where no rank has anything, so that all of them fail.
    looked_up = torch.where(counted & ((target < 0) | (target >= vocab_size)), len(vocab), column)
    kernels = _kernels_for(logits)
    if kernels is not None:
        own, total = kernels.row_sums(logits.contiguous())
        largest = group.all_reduce(own, "max")
        total = total * (own - largest).exp()
    else:
        largest = group.all_reduce(_row_max(logits).to(wide), "max")
        total = torch.cat([(part.to(wide) - m[:, None]).exp().sum(-1) for part, m in _chunks(logits, largest)])
    if len(vocab):
        at_target = torch.where(mine, logits.gather(-1, looked_up[:, None])[:, 0].to(wide), 0)
    else:
        at_target = torch.zeros_like(total)
    total, at_target = group.all_reduce(torch.stack([total, at_target]))
    log_sum = total.log() + largest
    return torch.where(counted, log_sum - at_target, 0), Rows(log_sum, column, mine, counted)


def row_gradients(logits: Tensor, rows: Rows, g: Tensor) -> Tensor:
    """The gradient of `logits` [N, V], in their dtype, for the gradients `g` [N] of their rows' losses."""
    log_sum, column, mine, counted = rows
    scale = torch.where(counted, g, 0)
    kernels = _kernels_for(logits)
    if kernels is not None:
        found: Tensor = kernels.softmax_gradient(logits.contiguous(), log_sum, column, mine, scale.float())
        return found
    if torch.compiler.is_compiling():
        # Element by element: a compiler reads and writes each logit once, and writes in parts would copy the rest.
        probability = (logits.to(log_sum.dtype) - log_sum[:, None]).exp()
        at_target = mine[:, None] & (column[:, None] == torch.arange(logits.shape[-1], device=logits.device))
        return ((probability - at_target.to(log_sum.dtype)) * scale[:, None]).to(logits.dtype)
    out = torch.empty_like(logits)
    done = 0
    for part, m in _chunks(logits, log_sum):
        here = slice(done, done := done + len(part))
        difference = (part.to(m.dtype) - m[:, None]).exp()
        if part.shape[-1]:
            difference.scatter_add_(-1, column[here, None], -mine[here, None].to(m.dtype))
        out[here] = difference * scale[here, None]
    return out


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, target: Tensor, vocab: range, vocab_size: int, group: Group, ignore_index: int
    ) -> Tensor:
        losses, rows = row_losses(logits, target, vocab, vocab_size, group, ignore_index)
        ctx.save_for_backward(logits, *rows)
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> Any:
        logits, *rows = ctx.saved_tensors
        return row_gradients(logits, Rows(*rows), g), None, None, None, None, None


def causal_lm_loss(
    logits: Tensor,
    labels: Tensor | None,
    vocab: range,
    vocab_size: int,
    group: Group,
    num_items_in_batch: Tensor | int | None = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
) -> Tensor:
    """transformers' loss of a causal LM: the mean over the counted targets, or their sum over `num_items_in_batch`.

    Args:
        logits: [batch, length, len(vocab)], this rank's share of the vocabulary.
        labels: [batch, length]; position i is compared with label i + 1. Not needed with `shift_labels`, which are
            compared as they stand.
    """
    rows = logits.reshape(-1, logits.shape[-1])

    def losses(target: Tensor) -> Tensor:
        return vocab_parallel_cross_entropy(rows, target.to(logits.device), vocab, vocab_size, group, ignore_index)

    return mean_over_targets(losses, labels, num_items_in_batch, ignore_index, shift_labels)


def mean_over_targets(
    losses_of: Callable[[Tensor], Tensor],
    labels: Tensor | None,
    num_items_in_batch: Tensor | int | None = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
) -> Tensor:
    """`causal_lm_loss` of losses that `losses_of` finds for the targets, [batch * length]."""
    if shift_labels is None:
        if labels is None:
            raise ValueError("the loss of a causal LM needs labels or shift_labels")
        shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    target = shift_labels.reshape(-1)
    losses = losses_of(target)
    if num_items_in_batch is None:
        return losses.sum() / (target != ignore_index).sum().to(losses.device)
    if torch.is_tensor(num_items_in_batch):
        num_items_in_batch = num_items_in_batch.to(losses.device)
    return losses.sum() / num_items_in_batch


def _kernels_for(logits: Tensor) -> Any:
    """Kernels that read and write each logit once; None where they are not for these."""
    if not logits.is_cuda or logits.dtype == torch.float64 or 0 in logits.shape or find_spec("triton") is None:
        return None
    if torch.compiler.is_compiling():
        return None
    from phalanx.ops.triton import training

    return training


def _row_max(logits: Tensor) -> Tensor:
    if logits.shape[-1] == 0:
        return logits.new_full(logits.shape[:-1], torch.finfo(logits.dtype).min)
    return logits.amax(-1)


def _chunks(logits: Tensor, rows: Tensor) -> list[tuple[Tensor, Tensor]]:
    if torch.compiler.is_compiling():
        # Compiled, nothing that is wider lies in memory.
        return [(logits, rows)]
    count = max(1, _ELEMENTS_AT_ONCE // max(1, logits.shape[-1]))
    return list(zip(logits.split(count), rows.split(count), strict=True))
