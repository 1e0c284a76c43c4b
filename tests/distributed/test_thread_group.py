import time

import pytest
import torch

from phalanx.distributed.group import Group, GroupError, SoloGroup
from phalanx.distributed.thread_group import run_threads
from tests.distributed.collective_cases import check_everything, check_no_trace_of_inputs


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_collectives(world: int) -> None:
    run_threads(world, check_everything)
    run_threads(world, check_no_trace_of_inputs)


def test_solo_group() -> None:
    with SoloGroup() as group:
        check_everything(group)


def test_results_come_by_rank() -> None:
    assert run_threads(3, lambda group: (group.rank, group.size)) == [(0, 3), (1, 3), (2, 3)]


def test_sum_is_in_rank_order() -> None:
    values = [1e8, 1.0, -1e8]
    for total in run_threads(3, lambda group: group.all_reduce(torch.tensor([values[group.rank]]))):
        assert total.item() == ((torch.tensor(1e8) + 1.0) - 1e8).item()


def test_half_precision_is_summed_in_fp32() -> None:
    values = [256.0, 1.0, 1.0]
    totals = run_threads(3, lambda group: group.all_reduce(torch.tensor([values[group.rank]], dtype=torch.bfloat16)))
    assert [t.item() for t in totals] == [258.0] * 3  # in bf16, 256 + 1 is 256


def test_an_error_on_one_rank_ends_the_others() -> None:
    seen: list[str] = []

    def work(group: Group) -> None:
        if group.rank == 1:
            raise KeyError("the cause")
        try:
            group.broadcast_bytes(None if group.rank else b"")
            group.barrier()
        except GroupError as error:
            seen.append(str(error))
            raise

    with pytest.raises(KeyError, match="the cause") as caught:
        run_threads(3, work)
    assert caught.value.__notes__ == ["on rank 1 of 3"]
    assert seen == ["rank 1 failed: KeyError: 'the cause'"] * 2


def test_different_calls_are_told() -> None:
    def work(group: Group) -> None:
        if group.rank == 0:
            group.all_reduce(torch.zeros(2))
        else:
            group.all_reduce(torch.zeros(3))

    with pytest.raises(GroupError, match=r"rank 0: all_reduce of torch.float32 \[2\], rank 1: all_reduce .* \[3\]"):
        run_threads(2, work)


def test_a_rank_that_has_returned_is_not_waited_for() -> None:
    def work(group: Group) -> None:
        if group.rank != 1:
            group.barrier()

    with pytest.raises(GroupError, match=r"barrier: ranks \[1\] have already returned"):
        run_threads(3, work)


def test_timeout_names_who_is_absent() -> None:
    def work(group: Group) -> None:
        if group.rank == 2:
            time.sleep(0.5)
        group.barrier()

    with pytest.raises(GroupError, match=r"barrier: no answer from ranks \[2\] within 0.1 s"):
        run_threads(3, work, timeout=0.1)


def test_abort_ends_who_waits() -> None:
    def work(group: Group) -> None:
        if group.rank == 0:
            group.abort("enough")
        else:
            group.barrier()

    with pytest.raises(GroupError, match="enough"):
        run_threads(2, work)


def test_world_of_none_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        run_threads(0, lambda group: None)
