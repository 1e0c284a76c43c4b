"""`torch.distributed` under the names of `deepspeed.comm`, and the start of it."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed import (
    ReduceOp,
    all_gather,
    all_gather_into_tensor,
    all_gather_object,
    all_reduce,
    all_to_all,
    all_to_all_single,
    barrier,
    broadcast,
    broadcast_object_list,
    destroy_process_group,
    gather,
    get_backend,
    get_global_rank,
    get_process_group_ranks,
    get_rank,
    get_world_size,
    irecv,
    is_available,
    is_initialized,
    isend,
    monitored_barrier,
    new_group,
    recv,
    reduce,
    reduce_scatter,
    reduce_scatter_tensor,
    scatter,
    send,
)

__all__ = [
    "ReduceOp",
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "destroy_process_group",
    "gather",
    "get_all_ranks_from_group",
    "get_backend",
    "get_global_rank",
    "get_local_rank",
    "get_rank",
    "get_world_group",
    "get_world_size",
    "inference_all_reduce",
    "init_distributed",
    "irecv",
    "is_available",
    "is_initialized",
    "isend",
    "monitored_barrier",
    "new_group",
    "recv",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "scatter",
    "send",
]

get_all_ranks_from_group = get_process_group_ranks
"""The global ranks of a group, by their rank in it."""

DEFAULT_PORT = 29500


def get_world_group() -> dist.ProcessGroup:
    """The group of all ranks. Raises ValueError before `init_distributed`."""
    world = dist.group.WORLD
    return _not_started() if world is None else world


def get_local_rank() -> int:
    """This process's place on its machine: `LOCAL_RANK` of the launcher, 0 without one."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def inference_all_reduce(
    tensor: torch.Tensor, op: ReduceOp.RedOpType = ReduceOp.SUM, group: dist.ProcessGroup | None = None
) -> None:
    """`all_reduce`, as DeepSpeed's inference layers call it."""
    dist.all_reduce(tensor, op, group)


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = DEFAULT_PORT,
    verbose: bool = True,
    timeout: timedelta | None = None,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: Any = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Start `torch.distributed`, unless it runs already; this rank's GPU becomes the current one.

    The ranks are those of the launcher (`phalanx launch`, torchrun: RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR,
    MASTER_PORT), or `rank` and `world_size` with `init_method`. A process without a launcher is the only rank.

    Args:
        dist_backend: default NCCL for CUDA tensors and gloo for those on the CPU; gloo where there is no GPU.
        auto_mpi_discovery: mpirun is not read: a process that it has started is refused, unless this is False.
        distributed_port: where rank 0 listens if MASTER_PORT is not set.
        timeout: of a collective.
        dist_init_required: False to start nothing: then it must run already.
        verbose, config: what DeepSpeed logs; without effect.

    Raises RuntimeError where the ranks cannot be told, and what torch raises where they do not meet.
    """
    if dist.is_initialized():
        return
    if dist_init_required is False:
        _not_started()
    nccl = torch.cuda.is_available() and dist.is_nccl_available()
    backend = dist_backend or ("cpu:gloo,cuda:nccl" if nccl else "gloo")
    if nccl and "nccl" in backend:
        torch.cuda.set_device(get_local_rank())
    if rank >= 0 or world_size >= 0 or init_method is not None:
        dist.init_process_group(backend, init_method, timeout, world_size, rank)
    elif "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        os.environ.setdefault("MASTER_PORT", str(distributed_port))
        dist.init_process_group(backend, timeout=timeout)
    elif auto_mpi_discovery and int(os.environ.get("OMPI_COMM_WORLD_SIZE", "1")) > 1:
        raise RuntimeError(
            "this process was started by mpirun, whose ranks are not read: start it with `phalanx launch` or torchrun, "
            "or set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT"
        )
    else:
        dist.init_process_group(backend, timeout=timeout, store=dist.HashStore(), rank=0, world_size=1)


def _not_started() -> NoReturn:
    raise ValueError("torch.distributed has not been started: call init_distributed() first")
