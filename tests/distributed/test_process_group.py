import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest
import torch
import torch.distributed as dist

from phalanx.distributed.group import GroupError
from phalanx.distributed.launch import Ranks
from phalanx.distributed.process_group import ProcessGroup
from tests.distributed.collective_cases import check_all_reduce, check_everything

MODULE = "tests.distributed.collective_cases"


@contextmanager
def ranks(world: int, behaviour: str, grace: float = 5.0) -> Iterator[Ranks]:
    started = Ranks(world, MODULE, [behaviour])
    try:
        yield started
    finally:
        started.close(grace)


@pytest.mark.parametrize("worlds", [(1,), (2, 3), (4,)])
def test_collectives(worlds: tuple[int, ...]) -> None:
    """Several worlds at once in this process, and in each two groups."""
    with ExitStack() as stack:
        started = [stack.enter_context(ranks(world, "check", grace=20.0)) for world in worlds]
        groups = []
        for world in started:
            first = ProcessGroup(world.rendezvous, timeout=20.0)
            check_everything(first)
            groups.append(ProcessGroup(world.rendezvous, timeout=20.0))
            check_all_reduce(groups[-1])
            first.close()
            with pytest.raises(GroupError, match="was closed on rank 0"):
                first.barrier()
        for _ in range(3):
            for group in groups:
                group.broadcast_bytes(b"four")
            sums = [group.all_reduce(torch.tensor(0.0)).item() for group in groups]
            assert sums == [4.0 * (world - 1) for world in worlds]
        for group in groups:
            group.broadcast_bytes(b"stop")
    assert all(world.deaths == [] for world in started)
    assert not dist.is_initialized()


def test_a_killed_rank_is_named_on_every_other() -> None:
    with ranks(3, "last is killed") as started:
        group = ProcessGroup(started.rendezvous, timeout=60.0)
        group.barrier()
        start = time.monotonic()
        with pytest.raises(GroupError, match="failed on rank 0: rank 2 was killed by SIGKILL"):
            group.all_reduce(torch.ones(3))
        assert time.monotonic() - start < 5.0
        with pytest.raises(GroupError, match="rank 2 was killed by SIGKILL"):
            group.broadcast_bytes(b"again")
        while len(started.deaths) < 2 and time.monotonic() - start < 10.0:
            time.sleep(0.05)
    killed, other = started.deaths
    assert (killed.rank, killed.code) == (2, -9)
    assert (other.rank, other.code) == (1, 1)
    assert "failed on rank 1: rank 2 was killed by SIGKILL" in other.stderr


def test_a_rank_that_fails_ends_those_who_wait_for_it() -> None:
    """Rank 2 waits for rank 1, which sleeps; rank 0 waits for rank 2 only. No rank has died."""
    with ranks(3, "last waits for nobody", grace=0.0) as started:
        group = ProcessGroup(started.rendezvous, timeout=60.0)
        group.barrier()
        start = time.monotonic()
        with pytest.raises(GroupError, match=r"no answer from ranks \[1\]"):
            group.broadcast(torch.ones(3), 2)
        assert time.monotonic() - start < 15.0


def test_a_rank_that_dies_before_it_joins() -> None:
    expected = "did not form: rank 1 ended with exit code 1: no memory for me"
    with ranks(2, "die early") as started, pytest.raises(GroupError, match=expected):
        ProcessGroup(started.rendezvous, start_timeout=60.0)


def test_a_rank_that_never_comes() -> None:
    with ranks(1, "check") as started:
        alone = started.rendezvous
        with pytest.raises(GroupError, match=r"no sign of ranks \[1\] within 0.1 s"):
            ProcessGroup(type(alone)(alone.store, 0, 2, 0, alone.address), start_timeout=0.1)


class HeldByGraphs:
    """NCCL's side of a group whose abort returns only when no graph holds its kernels."""

    def __init__(self) -> None:
        self.graphs_are_gone = threading.Event()
        self.aborts = 0

    def abort(self) -> None:
        self.aborts += 1
        self.graphs_are_gone.wait(30.0)

    def allreduce(self, *_: object) -> None:
        raise RuntimeError("a rank is gone")


@pytest.fixture
def held() -> Iterator[tuple[ProcessGroup, HeldByGraphs]]:
    with ranks(1, "check") as started:
        group, nccl = ProcessGroup(started.rendezvous, timeout=20.0), HeldByGraphs()
        group._data = nccl
        yield group, nccl
        nccl.graphs_are_gone.set()
        group.close()
        assert nccl.aborts == 1
        assert not any(thread.name == "phalanx-abort" for thread in threading.enumerate())


def test_a_failure_does_not_wait_for_what_holds_the_kernels(held: tuple[ProcessGroup, HeldByGraphs]) -> None:
    group, _ = held
    start = time.monotonic()
    with pytest.raises(GroupError, match=r"all_reduce of .* failed on rank 0: all ranks are there"):
        group.all_reduce(torch.ones(2))
    group.abort("the thread that watches says so too")
    assert time.monotonic() - start < 1.0
    with pytest.raises(GroupError, match="failed on rank 0"):
        group.check()


def test_closing_ends_the_kernels_whoever_said_first_that_something_is_wrong(
    held: tuple[ProcessGroup, HeldByGraphs],
) -> None:
    group, nccl = held
    # Another thread has got as far as this.
    group._fault = "rank 1 was killed"
    nccl.graphs_are_gone.set()
    group.close()
    assert nccl.aborts == 1


def test_device_without_a_back_end_is_refused() -> None:
    with ranks(1, "check") as started, pytest.raises(ValueError, match="no process group for device meta"):
        ProcessGroup(started.rendezvous, "meta")


def test_under_torchrun() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", MODULE]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([*command, "check all"], capture_output=True, text=True, timeout=100, env=env)
    assert done.returncode == 0, done.stderr
