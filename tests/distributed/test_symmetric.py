"""The all-reduce over shared memory, its ranks played one after the other in one process."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from phalanx.distributed.group import GroupError, SoloGroup
from phalanx.ops.norm import reference_add_rms_norm

pytest.importorskip("triton", reason="triton is not installed")

from phalanx.distributed import symmetric
from tests.ops.triton import attention_case  # noqa: F401  (completes the interpreter)

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# Not bfloat16: Triton's interpreter cuts it off where the hardware rounds.
# The dtype, and up to which size words of two numbers are marked.
KINDS = [(torch.float32, 0), (torch.float16, 0), (torch.float16, 1 << 20)]


class Played:
    """Ranks that share a process: what each sends is sent by a first run, which gives up waiting."""

    def __init__(self, size: int, monkeypatch: pytest.MonkeyPatch, **settings: int) -> None:
        count = symmetric.memory_bytes(size)
        self.memories = [torch.zeros(count, dtype=torch.uint8, device=DEVICE) for _ in range(size)]
        monkeypatch.setattr(symmetric, "share", lambda *_: [m.data_ptr() for m in self.memories])
        self.ranks = []
        for rank in range(size):
            group = SoloGroup()
            group.rank, group.size = rank, size
            self.ranks.append(symmetric.SymmetricMemory(group, DEVICE, patience=1e-9, **settings))

    def run(self, call) -> list:
        """``call(rank's SymmetricMemory, rank)`` of every rank, as if at the same time."""
        states = [rank._state.clone() for rank in self.ranks]
        for number, rank in enumerate(self.ranks):
            call(rank, number)
            rank._state.copy_(states[number])
        sent = [self.signals(number).clone() for number in range(len(self.ranks))]
        results = []
        for number, rank in enumerate(self.ranks):
            results.append(call(rank, number))
            for other, signals in enumerate(sent):
                self.signals(other).copy_(signals)
            rank.check()
        return results

    def signals(self, rank: int) -> Tensor:
        return self.memories[rank][: symmetric._SIGNAL_BYTES]


def added(tensors: list[Tensor]) -> Tensor:
    total = torch.zeros_like(tensors[0], dtype=torch.float32)
    for t in tensors:
        total += t.float()
    return total.to(tensors[0].dtype)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(("dtype", "words_bytes"), KINDS)
def test_sums_in_the_order_of_the_ranks(
    size: int, dtype: torch.dtype, words_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    played = Played(size, monkeypatch, words_bytes=words_bytes)
    for shape in [(1,), (3, 1111), (2048,), (5, 7), (2, 2049), (6, 2000)]:
        given = [torch.randn(shape, device=DEVICE).to(dtype) for _ in range(size)]
        for found in played.run(lambda memory, rank, given=given: memory.all_reduce(given[rank])):
            assert torch.equal(found, added(given))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_counts_that_wrap_around(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    played = Played(2, monkeypatch)
    last = 2**31 - 1
    for number, rank in enumerate(played.ranks):
        places, words = rank._state[1:].chunk(2)
        places[:, 1:4], words[:, 0] = last, last
        played.signals(number).view(torch.int32).fill_(last)
    for _ in range(3):
        given = [torch.randn(10, device=DEVICE).to(dtype) for _ in range(2)]
        for found in played.run(lambda memory, rank, given=given: memory.all_reduce(given[rank])):
            assert torch.equal(found, added(given))


@pytest.mark.parametrize(("dtype", "words_bytes"), KINDS)
def test_with_residual_and_norm(dtype: torch.dtype, words_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    played = Played(2, monkeypatch, words_bytes=words_bytes)
    for rows, width in [(1, 300), (4, 64), (3, 1024), (131, 70)]:
        given = [torch.randn(rows, width, device=DEVICE).to(dtype) for _ in range(2)]
        residual, weight = torch.randn(rows, width, device=DEVICE).to(dtype), torch.randn(width, device=DEVICE)
        normed, new = reference_add_rms_norm(added(given), residual, weight, 1e-5)

        def call(memory, rank, given=given, residual=residual, weight=weight):
            return memory.all_reduce_add_rms_norm(given[rank], residual, weight, 1e-5)

        first, second = played.run(call)
        assert torch.equal(first[1], new) and torch.equal(second[1], new) and torch.equal(first[0], second[0])
        tolerance = 1e-5 if dtype == torch.float32 else 1e-2
        torch.testing.assert_close(first[0], normed, rtol=tolerance, atol=tolerance)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few programs, of which each holds little, so that small tensors take steps, up to as many as there are places."""
    monkeypatch.setattr(symmetric, "_PROGRAMS", 4)
    monkeypatch.setattr(symmetric, "_MAX_ELEMENTS", 2048)
    monkeypatch.setattr(symmetric, "_MAX_WORDS", 1024)
    monkeypatch.setattr(symmetric, "_SIGNAL_BYTES", symmetric._PLACES * 4 * 4)


@pytest.mark.usefixtures("small")
def test_large_tensors_in_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    played = Played(2, monkeypatch)
    for count in (4 * 2048 + 1, 3 * 4 * 2048, 2 * 4 * 2048 + 5000, 77):
        given = [torch.randn(count, device=DEVICE) for _ in range(2)]
        for found in played.run(lambda memory, rank, given=given: memory.all_reduce(given[rank])):
            assert torch.equal(found, added(given))
    for rows, width in [(23, 500), (96, 256), (5, 2000), (12, 1100), (1, 9)]:
        given = [torch.randn(rows, width, device=DEVICE) for _ in range(2)]
        residual, weight = torch.randn(rows, width, device=DEVICE), torch.randn(width, device=DEVICE)
        normed, new = reference_add_rms_norm(added(given), residual, weight, 1e-5)

        def call(memory, rank, given=given, residual=residual, weight=weight):
            return memory.all_reduce_add_rms_norm(given[rank], residual, weight, 1e-5)

        for found in played.run(call):
            assert torch.equal(found[1], new)
            torch.testing.assert_close(found[0], normed, rtol=1e-5, atol=1e-5)


def test_halves_of_words_are_where_they_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    played = Played(2, monkeypatch)
    given = [torch.randn(11, device=DEVICE).half()[1:] for _ in range(2)]
    for found in played.run(lambda memory, rank: memory.all_reduce(given[rank])):
        assert torch.equal(found, added(given))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_rank_that_does_not_come_is_told_of(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = Played(2, monkeypatch).ranks[0]
    alone.all_reduce(torch.ones(4, device=DEVICE, dtype=dtype))
    with pytest.raises(GroupError, match="waited in vain"):
        alone.check()


def test_what_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = Played(2, monkeypatch).ranks[0]
    for t in (torch.ones(4, 4).T[:, 1:], torch.ones(2, dtype=torch.int64), torch.ones(0)):
        assert not memory.fits(t)
        with pytest.raises(ValueError, match="does not fit"):
            memory.all_reduce(t)
    assert memory.fits_norm(torch.ones(129, 4)) and not memory.fits_norm(torch.ones(1, 1 << 15))
    with pytest.raises(ValueError, match="expected a residual like x"):
        memory.all_reduce_add_rms_norm(torch.ones(2, 4), torch.ones(1, 4), torch.ones(4), 1e-5)
    with pytest.raises(ValueError, match="2 to 8 ranks"):
        symmetric.SymmetricMemory(SoloGroup(), DEVICE)
