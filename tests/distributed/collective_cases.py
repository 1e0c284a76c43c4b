"""What every group must do, checked by each rank against plain tensor arithmetic; also a rank's program.

As a program (`python -m tests.distributed.collective_cases BEHAVIOUR`) it is a rank that joins a group and behaves.
"""

from __future__ import annotations

import os
import signal
import sys
import time

import pytest
import torch
from torch import Tensor

from phalanx.distributed.group import Group, GroupError
from phalanx.distributed.process_group import ProcessGroup
from phalanx.distributed.rendezvous import Rendezvous


def sample(shape: tuple[int, ...], dtype: torch.dtype, rank: int) -> Tensor:
    """Small integers, so that sums are exact in every dtype. On the default device, as all tensors here."""
    generator = torch.Generator("cpu").manual_seed(rank * 1000 + sum(shape))
    values = torch.randint(0 if dtype == torch.bool else -8, 8, shape, generator=generator, device="cpu")
    return values.to(torch.get_default_device(), dtype)


def check_all_reduce(group: Group) -> None:
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32):
        for shape in ((5, 3), (1,), (0, 4), (), (64, 128)):
            expected = torch.stack([sample(shape, torch.float64, r) for r in range(group.size)]).sum(0).to(dtype)
            got = group.all_reduce(sample(shape, dtype, group.rank))
            torch.testing.assert_close(got, expected, rtol=0, atol=0)
    expected = sum(sample((3, 4), torch.float32, r) for r in range(group.size)).t()
    torch.testing.assert_close(group.all_reduce(sample((3, 4), torch.float32, group.rank).t()), expected)


def check_all_gather(group: Group) -> None:
    n = group.size
    for sizes in ([3] * n, [2, 0, 5, 1][:n], [0, 7, 0, 2][:n], [0] * n):
        for dtype, dim, shape in (
            (torch.float32, 1, (2, -1, 3)),
            (torch.bfloat16, 0, (-1, 3)),
            (torch.int64, 0, (-1,)),
            (torch.int16, -1, (4, -1)),
            (torch.bool, -2, (-1, 1)),
            (torch.float8_e4m3fn, 0, (-1, 5)),
            (torch.float32, 1, (0, -1)),
        ):
            parts = [sample(tuple(size if d < 0 else d for d in shape), dtype, r) for r, size in enumerate(sizes)]
            got = group.all_gather(parts[group.rank], dim, sizes)
            assert got.dtype == dtype
            torch.testing.assert_close(got.float(), torch.cat([p.float() for p in parts], dim), rtol=0, atol=0)
    even = group.all_gather(torch.full((2, 2), float(group.rank)), 1)
    torch.testing.assert_close(even, torch.arange(n).repeat_interleave(2).float().expand(2, -1))
    strided = group.all_gather(torch.full((3, 2), float(group.rank)).t(), 0)
    torch.testing.assert_close(strided, torch.arange(n).repeat_interleave(2).float()[:, None].expand(-1, 3))


def check_broadcast(group: Group) -> None:
    for src in range(group.size):
        for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool):
            for shape in ((4, 5), (0,), ()):
                t = sample(shape, dtype, group.rank)
                assert group.broadcast(t, src) is t
                torch.testing.assert_close(t, sample(shape, dtype, src), rtol=0, atol=0)
        t = sample((4, 5), torch.float32, group.rank).t()
        group.broadcast(t, src)
        torch.testing.assert_close(t, sample((4, 5), torch.float32, src).t())


def check_broadcast_bytes(group: Group) -> None:
    for length in (0, 1, 4087, 4088, 4089, 100_000):
        expected = bytes(i * 7 % 256 for i in range(length))
        assert group.broadcast_bytes(expected if group.rank == 0 else None) == expected
    if group.rank == 0:
        with pytest.raises(ValueError, match="rank 0 must give"):
            group.broadcast_bytes(None)


def check_refusals(group: Group) -> None:
    """What a rank can tell by itself is refused before anything is sent, and the group goes on."""
    with pytest.raises(ValueError, match=r"shape \(2, 3\) does not fit sizes"):
        group.all_gather(torch.zeros(2, 3), 0, [5] * group.size)
    with pytest.raises(ValueError, match="no such dimension"):
        group.all_gather(torch.zeros(2), 1)
    with pytest.raises(ValueError, match=f"ranks 0 to {group.size - 1}"):
        group.broadcast(torch.zeros(2), group.size)


def check_everything(group: Group) -> None:
    check_all_reduce(group)
    check_all_gather(group)
    check_broadcast(group)
    check_broadcast_bytes(group)
    check_refusals(group)
    group.barrier()
    group.check()


def check_no_trace_of_inputs(group: Group) -> None:
    """A result belongs to its rank: writing to it or to the input changes nothing elsewhere."""
    mine = torch.ones(4)
    total = group.all_reduce(mine)
    total += group.rank
    mine.fill_(-1)
    group.barrier()
    if group.size > 1:
        torch.testing.assert_close(group.all_reduce(torch.ones(4)), torch.full((4,), float(group.size)))


def check_on_gpu(group: Group, device: torch.device) -> None:
    """The collectives with NCCL, eagerly and inside a CUDA graph."""
    torch.cuda.set_device(device)
    with device:
        check_everything(group)
        x = torch.ones(4, 8)
        total, parts = torch.zeros(4, 8), torch.zeros(4, 8 * group.size)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            total.copy_(group.all_reduce(x * 1))
            parts.copy_(group.all_gather(x, dim=1))
        for step in range(3):
            x.fill_(step + group.rank)
            graph.replay()
            expected = torch.arange(group.size) + step
            torch.testing.assert_close(total, expected.sum().float().expand(4, 8))
            torch.testing.assert_close(parts, expected.float().repeat_interleave(8).expand(4, -1))


def behave(behaviour: str) -> None:
    place = Rendezvous.from_env()
    if behaviour.startswith("gpu"):
        device = torch.device("cuda", place.local_rank)
        group = ProcessGroup(place, device, timeout=30.0)
        check_on_gpu(group, device)
        group.barrier()
        if behaviour == "gpu, killed":
            os.kill(os.getpid(), signal.SIGKILL)
        group.close()
        return
    if behaviour == "die early":
        sys.exit("no memory for me")
    group = ProcessGroup(place, timeout=2.0 if behaviour == "last waits for nobody" else 20.0)
    if behaviour == "check all":
        check_everything(group)
    elif behaviour == "check":
        check_everything(group)
        second = ProcessGroup(place, timeout=20.0)
        check_all_reduce(second)
        group.close()
        while (message := second.broadcast_bytes()) != b"stop":
            second.all_reduce(torch.tensor(float(len(message))))
    elif behaviour == "last is killed":
        group.barrier()
        if place.rank == place.size - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        group.all_reduce(torch.ones(3))
    elif behaviour == "last waits for nobody":
        group.barrier()
        if place.rank < place.size - 1:
            time.sleep(60)
        with pytest.raises(GroupError):
            group.broadcast(torch.ones(3), place.size - 2)
    else:
        raise ValueError(behaviour)


if __name__ == "__main__":
    behave(sys.argv[1])
