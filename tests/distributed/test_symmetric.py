"""The all-reduce over shared memory, its ranks played one after the other in one process."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from phalanx.distributed.group import GroupError, SoloGroup
from phalanx.ops.norm import reference_add_rms_norm

pytest.importorskip("triton", reason="triton is not installed")

from phalanx.distributed import symmetric
from phalanx.engine.inference_engine import sizes_to_warm
from tests.ops.triton import attention_case  # noqa: F401  (completes the interpreter)

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# Not bfloat16: Triton's interpreter cuts it off where the hardware rounds.
# The dtype, and up to which size words of two numbers are marked.
KINDS = [(torch.float32, 0), (torch.float16, 0), (torch.float16, 1 << 20)]


class Played:
    """Ranks that share a process, and run one after the other, again and again: each time with what the others sent in
    the time before, until none gives up waiting."""

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
        before = torch.stack([self.signals(number) for number in range(len(self.ranks))])
        # Of each rank, what it adds to the signals in every memory.
        sent = [torch.zeros_like(before) for _ in self.ranks]
        for _ in range(1 + symmetric._PLACES):
            results, sending = [], []
            for number, rank in enumerate(self.ranks):
                there = before + sum(sent) - sent[number]
                for memory, signals in enumerate(there):
                    self.signals(memory).copy_(signals)
                rank._state.copy_(states[number])
                results.append(call(rank, number))
                sending.append(torch.stack([self.signals(memory) for memory in range(len(there))]) - there)
            sent = sending
            if not any(int(rank.fault_flag) for rank in self.ranks):
                break
        for memory, signals in enumerate(before + sum(sent)):
            self.signals(memory).copy_(signals)
        for rank in self.ranks:
            rank.check()
        return results

    def signals(self, rank: int) -> Tensor:
        return self.memories[rank][: symmetric._SIGNAL_BYTES].view(torch.int32)


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
        played.signals(number).fill_(last)
    for _ in range(3):
        given = [torch.randn(10, device=DEVICE).to(dtype) for _ in range(2)]
        for found in played.run(lambda memory, rank, given=given: memory.all_reduce(given[rank])):
            assert torch.equal(found, added(given))


def test_the_number_of_a_call_is_never_that_of_cleared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    played = Played(2, monkeypatch)
    numbers = []
    for rank in played.ranks:
        rank._state[1:].chunk(2)[1][:, 0] = -3
    for _ in range(4):
        played.run(lambda memory, rank: memory.all_reduce(torch.ones(4, device=DEVICE, dtype=torch.float16)))
        numbers.append(int(played.ranks[0]._state[1:].chunk(2)[1][0, 0]))
    # The last bit says whose turn it is.
    assert numbers == [-2, -1, 2, 3]


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
    assert alone.all_reduce(torch.ones(4, device=DEVICE, dtype=dtype)).isnan().all()
    with pytest.raises(GroupError, match="waited in vain"):
        alone.check()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_rank_that_gave_up_takes_the_late_one_with_it(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it sent before is right, and what it would send later is wrong."""
    early, late = Played(2, monkeypatch).ranks
    given = [torch.full((4,), value, device=DEVICE, dtype=dtype) for value in (1.0, 10.0, 20.0, 30.0)]
    for t in given[:3]:
        early.all_reduce(t)
    assert torch.equal(late.all_reduce(given[3]), given[0] + given[3])
    late.check()
    assert late.all_reduce(given[3]).isnan().all()
    with pytest.raises(GroupError, match="waited in vain"):
        late.check()


@pytest.mark.parametrize("width", [576, 896, 1024, 1536, 2048, 4096, 5120, 8192])
def test_an_engine_has_run_every_variant_when_it_starts(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    budget, variants = 8192, set()

    class Noted:
        def __init__(self, name: str) -> None:
            self.name = name

        def __getitem__(self, grid):
            return lambda *given, **constants: variants.add((self.name, *sorted(constants.items())))

    for name in ("all_reduce_kernel", "all_reduce_words_kernel"):
        monkeypatch.setattr(symmetric, name, Noted(name))
    memory = Played(2, monkeypatch).ranks[0]

    def run(tokens: int) -> None:
        x = torch.empty(tokens, width, dtype=torch.bfloat16)
        memory.all_reduce(x)
        memory.all_reduce_add_rms_norm(x, x, x[0], 1e-5)

    for tokens in (*sizes_to_warm(budget), budget):
        run(tokens)
    known = set(variants)
    for tokens in (*range(1, 600), *range(600, budget, 97)):
        run(tokens)
    assert variants == known


def test_what_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = Played(3, monkeypatch).ranks[0]
    for t in (torch.ones(4, 4).T[:, 1:], torch.ones(2, dtype=torch.int64), torch.ones(0), torch.ones(1 << 20)):
        assert not memory.fits(t)
        with pytest.raises(ValueError, match="does not fit"):
            memory.all_reduce(t)
    # Two ranks send no more than by a ring, however much it is.
    assert Played(2, monkeypatch).ranks[0].fits(torch.ones(1 << 20))
    assert memory.fits_norm(torch.ones(129, 4)) and not memory.fits_norm(torch.ones(1, 1 << 15))
    with pytest.raises(ValueError, match="expected a residual like x"):
        memory.all_reduce_add_rms_norm(torch.ones(2, 4), torch.ones(1, 4), torch.ones(4), 1e-5)
    with pytest.raises(ValueError, match="2 to 8 ranks"):
        symmetric.SymmetricMemory(SoloGroup(), DEVICE)
