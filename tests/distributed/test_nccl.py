import time

import pytest
import torch

from phalanx.distributed.group import GroupError
from phalanx.distributed.launch import Death, Ranks
from phalanx.distributed.process_group import ProcessGroup
from tests.distributed.collective_cases import check_on_gpu

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL between ranks needs a GPU for each")
MODULE = "tests.distributed.collective_cases"


def test_collectives() -> None:
    ranks = Ranks(2, MODULE, ["gpu"])
    device = torch.device("cuda", 0)
    with ProcessGroup(ranks.rendezvous, device, timeout=30.0) as group:
        check_on_gpu(group, device)
        group.barrier()
        ranks.close(grace=30.0)
    assert ranks.deaths == []


def test_abort_frees_a_kernel_that_waits_for_a_dead_rank() -> None:
    def on_death(death: Death) -> None:
        group.abort(str(death))

    ranks = Ranks(2, MODULE, ["gpu, killed"], on_death=on_death)
    device = torch.device("cuda", 0)
    group = ProcessGroup(ranks.rendezvous, device, timeout=30.0)
    check_on_gpu(group, device)
    group.barrier()
    start = time.monotonic()
    with pytest.raises(GroupError, match="rank 1 was killed by SIGKILL"):
        group.all_reduce(torch.ones(3, device=device))  # returns once it is queued, or raises if the abort came first
        torch.cuda.synchronize()
        group.check()
    assert time.monotonic() - start < 10.0
    ranks.close()
