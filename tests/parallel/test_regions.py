"""Each region in float64 against autograd over all ranks' values in one graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from phalanx.distributed.group import Group
from phalanx.distributed.thread_group import run_threads
from phalanx.layout import Partition, attention_blocks, grouped_attention_blocks, shard
from phalanx.parallel import loss as loss_module
from phalanx.parallel.layers import copied_runs
from phalanx.parallel.loss import causal_lm_loss, vocab_parallel_cross_entropy
from phalanx.parallel.regions import copy_in, gather_in, gather_out, scatter_out, split_in, sum_copies, sum_out

SIZES = (3, 2, 0, 4)
WORLD = len(SIZES)
DIM = 1


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def run(region: Callable[[Tensor, Group], Tensor], inputs: Sequence[Tensor], grads: Sequence[Tensor]) -> list[Tensor]:
    def rank(group: Group) -> tuple[Tensor, Tensor]:
        x = inputs[group.rank].clone().requires_grad_()
        y = region(x, group)
        y.backward(grads[group.rank])
        assert x.grad is not None
        return y.detach(), x.grad

    outs = run_threads(WORLD, rank)
    return [t for pair in outs for t in pair]


def test_whole_in_part_out() -> None:
    x, grads = randn(2, 9), [randn(2, 9, seed=r + 1) for r in range(WORLD)]
    results = run(copy_in, [x] * WORLD, grads)
    for y, gx in zip(results[::2], results[1::2], strict=True):
        assert torch.equal(y, x)
        torch.testing.assert_close(gx, sum(grads[1:], grads[0]))


def test_parts_summed() -> None:
    parts, g = [randn(2, 9, seed=r) for r in range(WORLD)], randn(2, 9, seed=9)
    results = run(sum_out, parts, [g] * WORLD)
    for y, gx in zip(results[::2], results[1::2], strict=True):
        torch.testing.assert_close(y, sum(parts[1:], parts[0]))
        assert torch.equal(gx, g)


def test_parts_joined_and_taken() -> None:
    whole, g = randn(2, 9), randn(2, 9, seed=5)
    parts, grads = whole.split(SIZES, DIM), g.split(SIZES, DIM)
    joined = run(lambda x, group: gather_out(x, group, DIM, SIZES), parts, [g] * WORLD)
    taken = run(lambda x, group: split_in(x, group, DIM, SIZES), [whole] * WORLD, grads)
    for rank in range(WORLD):
        assert torch.equal(joined[2 * rank], whole)
        assert torch.equal(joined[2 * rank + 1], grads[rank])
        assert torch.equal(taken[2 * rank], parts[rank])
        assert torch.equal(taken[2 * rank + 1], g)


@pytest.mark.parametrize("sizes", [SIZES, (3, 3, 3, 3)])
def test_a_cut_sequence_joined_and_cut_again(sizes: tuple[int, ...]) -> None:
    length = sum(sizes)
    whole = randn(2, length)
    alls = [randn(2, length, seed=r + 1) for r in range(WORLD)]
    total = sum(alls[1:], alls[0])
    joined = run(lambda x, group: gather_in(x, group, DIM, sizes), whole.split(sizes, DIM), alls)
    cut = run(lambda x, group: scatter_out(x, group, DIM, sizes), alls, whole.split(sizes, DIM))
    for rank in range(WORLD):
        assert torch.equal(joined[2 * rank], whole)
        torch.testing.assert_close(joined[2 * rank + 1], total.split(sizes, DIM)[rank])
        torch.testing.assert_close(cut[2 * rank], total.split(sizes, DIM)[rank])
        assert torch.equal(cut[2 * rank + 1], whole)


@pytest.mark.parametrize(
    "blocks",
    [
        attention_blocks(4, 1, 2),
        attention_blocks(6, 3, 2),
        attention_blocks(4, 2, 2)[1:2],
        grouped_attention_blocks(4, 2, 2),
    ],
    ids=["one KV head", "three KV heads", "K alone", "grouped"],
)
def test_gradients_of_copied_heads_are_summed(blocks: tuple) -> None:
    partition = Partition.column(blocks)
    rows = sum(block.size for block in blocks)
    whole = randn(rows, 3).requires_grad_()
    shards = [shard(whole, partition, r, WORLD) for r in range(WORLD)]
    weights = [randn(*part.shape, seed=r + 3) for r, part in enumerate(shards)]
    # What each rank's gradient must be: that of the whole tensor, from the sum of what all ranks do with it.
    index = torch.arange(rows * 3).view(rows, 3)
    loss = sum((whole.flatten()[shard(index, partition, r, WORLD)] * w).sum() for r, w in enumerate(weights))
    torch.as_tensor(loss).backward()
    assert whole.grad is not None
    expected = [shard(whole.grad, partition, r, WORLD) for r in range(WORLD)]

    def rank(group: Group) -> Tensor:
        part = shards[group.rank].clone().requires_grad_()
        copies = copied_runs(partition, (rows, 3), group.rank, WORLD)
        assert copies is not None
        (sum_copies(part, group, 0, *copies) * weights[group.rank]).sum().backward()
        assert part.grad is not None
        return part.grad

    for grad, right in zip(run_threads(WORLD, rank), expected, strict=True):
        torch.testing.assert_close(grad, right)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("elements_at_once", [1 << 24, 16], ids=["one chunk", "several chunks"])
def test_vocab_parallel_cross_entropy(
    elements_at_once: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loss_module, "_ELEMENTS_AT_ONCE", elements_at_once)
    vocab, tokens = (5, 4, 0, 4), 11
    logits = (3 * randn(tokens, sum(vocab))).to(dtype)
    target = torch.randint(0, sum(vocab), (tokens,), generator=torch.Generator().manual_seed(1))
    target[2] = -100
    g = randn(tokens, seed=2).to(torch.float64 if dtype == torch.float64 else torch.float32)
    whole = logits.clone().requires_grad_()
    wide = whole if dtype == torch.float64 else whole.float()
    losses = torch.nn.functional.cross_entropy(wide, target, reduction="none")
    losses.backward(g)
    assert whole.grad is not None
    starts = [sum(vocab[:r]) for r in range(WORLD + 1)]

    def rank(group: Group) -> tuple[Tensor, Tensor]:
        mine = range(starts[group.rank], starts[group.rank + 1])
        part = logits[:, mine.start : mine.stop].clone().requires_grad_()
        loss = vocab_parallel_cross_entropy(part, target, mine, sum(vocab), group)
        loss.backward(g)
        assert part.grad is not None
        return loss.detach(), part.grad

    results = run_threads(WORLD, rank)
    for loss, _ in results:
        torch.testing.assert_close(loss, losses.detach())
    torch.testing.assert_close(torch.cat([grad for _, grad in results], 1), whole.grad)


def test_all_labels_ignored_is_nan_with_zero_gradients_as_in_pytorch() -> None:
    def rank(group: Group) -> tuple[Tensor, Tensor]:
        logits = randn(1, 4, 3).requires_grad_()
        mine = range(3 * group.rank, 3 * group.rank + 3)
        loss = causal_lm_loss(logits, torch.full((1, 4), -100), mine, 6, group)
        loss.backward()
        assert logits.grad is not None
        return loss.detach(), logits.grad

    for loss, grad in run_threads(2, rank):
        assert loss.isnan()
        assert not grad.nan_to_num().any()


@pytest.mark.parametrize("target", [6, -5])
def test_a_target_outside_of_the_vocabulary_is_an_error(target: int) -> None:
    def rank(group: Group) -> str:
        mine = range(3 * group.rank, 3 * group.rank + 3)
        with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
            vocab_parallel_cross_entropy(randn(1, 3), torch.tensor([target]), mine, 6, group)
        return "refused"

    assert run_threads(2, rank) == ["refused", "refused"]


def test_second_derivatives() -> None:
    """The gradient of a gradient's norm, through a column and a row product, against one process."""
    x, a, b = randn(3, 4), randn(6, 4, seed=1), randn(4, 6, seed=2)

    def penalty(x: Tensor, product: Callable[[Tensor], Tensor]) -> Tensor:
        (g,) = torch.autograd.grad(product(x).pow(2).sum(), x, create_graph=True)
        return g.pow(2).sum()

    whole_a = a.clone().requires_grad_()
    penalty(x.clone().requires_grad_(), lambda x: torch.tanh(x @ whole_a.T) @ b.T).backward()

    def rank(group: Group) -> Tensor:
        part = a.split(3)[group.rank].clone().requires_grad_()
        mine = b.split(3, 1)[group.rank]
        penalty(
            x.clone().requires_grad_(),
            lambda x: sum_out(torch.tanh(copy_in(x, group) @ part.T) @ mine.T, group),
        ).backward()
        assert part.grad is not None
        return part.grad

    assert whole_a.grad is not None
    torch.testing.assert_close(torch.cat(run_threads(2, rank)), whole_a.grad)
