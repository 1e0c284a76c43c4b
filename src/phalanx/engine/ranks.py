"""Joining or starting the ranks of a tensor-parallel engine."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import Any

import torch

from phalanx.config import ConfigError, EngineConfig
from phalanx.distributed.group import Group, SoloGroup
from phalanx.distributed.launch import Death, Ranks
from phalanx.distributed.process_group import ProcessGroup
from phalanx.distributed.rendezvous import Rendezvous, under_torchrun

WORKER = "phalanx.engine.worker"


@dataclass
class Team:
    """A rank's group, and the processes that it started, if any.

    Attributes:
        spmd: the user started all ranks; each makes the same calls.
    """

    group: Group
    ranks: Ranks | None = None
    spmd: bool = False

    def close(self) -> None:
        """Ends the processes that were started here."""
        if self.ranks is not None:
            self.ranks.close()


def assemble(config: EngineConfig, spec: dict[str, Any] | None, group: Group | None = None) -> Team:
    """The group of an engine: the given one, torchrun's, or one of processes started here.

    Args:
        spec: what a started rank needs to open the same model, None where no other process can.

    Raises:
        ConfigError: the world does not fit ``tensor_parallel_size``.
        GroupError: the ranks did not come together.
    """
    size = config.tensor_parallel_size
    if group is not None:
        if group.size != size:
            raise ConfigError(f"tensor_parallel_size={size}, but the given group has {group.size} ranks")
        return Team(group, spmd=group.size > 1)
    if size == 1:
        set_threads(config, 1)
        return Team(SoloGroup())
    set_threads(config, size)
    if under_torchrun():
        place = Rendezvous.from_env()
        if place.size != size:
            raise ConfigError(
                f"tensor_parallel_size={size}, but this runs under torchrun with {place.size} ranks: make them equal"
            )
        return Team(join(place, config), spmd=True)
    if spec is None:
        raise ConfigError(
            f"tensor_parallel_size={size} starts processes that open the model themselves: give it as a path or hub "
            "id, or start all ranks yourself with torchrun"
        )
    if _on_gpus(config):
        _check_gpus(size)
    holder: list[Group] = []

    def on_death(death: Death) -> None:
        for member in holder:
            member.abort(str(death))

    ranks = Ranks(size, WORKER, [json.dumps(spec)], on_death=on_death)
    try:
        holder.append(join(ranks.rendezvous, config))
    except BaseException:
        ranks.close(grace=0.0)
        raise
    return Team(holder[0], ranks)


def join(place: Rendezvous, config: EngineConfig) -> Group:
    """This process's place in the group."""
    device = torch.device("cuda", place.local_rank) if _on_gpus(config) else torch.device("cpu")
    if device.type == "cuda":
        _check_gpus(place.local_rank + 1)
        # Kernels are launched on the current device, wherever their tensors are.
        torch.cuda.set_device(device)
    shared = config.all_reduce == "shared_memory"
    return ProcessGroup(place, device, timeout=config.collective_timeout, shared_memory=shared)


def _on_gpus(config: EngineConfig) -> bool:
    return config.device != "cpu" and torch.cuda.is_available()


def _check_gpus(ranks: int) -> None:
    """Raises ConfigError where this machine has fewer GPUs than ranks."""
    if ranks > torch.cuda.device_count():
        raise ConfigError(
            f"{ranks} ranks need a GPU each and this machine has {torch.cuda.device_count()}: lower "
            "tensor_parallel_size, or use device='cpu'"
        )


def set_threads(config: EngineConfig, ranks: int) -> None:
    """This process's share of the CPU's cores, unless the config says a number."""
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    elif ranks > 1:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // ranks))
