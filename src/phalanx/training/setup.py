"""What happens to a model before its first step: it moves to its device, ranks agree, its parameters are sharded."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from phalanx.distributed.mesh import Mesh
from phalanx.parallel.registry import LayoutRegistry
from phalanx.training.fragments import GradientShards, trained_parameters
from phalanx.training.fsdp import FsdpShards
from phalanx.training.precision import Precision
from phalanx.training.zero import FlatShards

_log = logging.getLogger(__name__)


def place(module: nn.Module, mesh: Mesh) -> None:
    """Move the model to the device of the mesh; its Parameter objects stay the same.

    Raises ValueError for parameters on the meta device, which have no values.
    """
    hollow = [name for name, parameter in module.named_parameters() if parameter.is_meta]
    if hollow:
        raise ValueError(
            f"{len(hollow)} parameters have no values (they are on the meta device), the first is {hollow[0]}: load "
            "their weights before training"
        )
    module.to(mesh.device)


def select(module: nn.Module, optimizer: Optimizer, registry: LayoutRegistry) -> dict[str, nn.Parameter]:
    """The parameters to train; says which others would compute a gradient that nobody uses."""
    trained = trained_parameters(module, optimizer, registry)
    left_out = [name for name, p in module.named_parameters() if p.requires_grad and name not in trained]
    if left_out:
        _log.warning(
            "%d parameters require a gradient but are in no param group of the optimizer, the first is %s: they stay "
            "as they are and out of the gradient's norm",
            len(left_out),
            left_out[0],
        )
    return trained


@torch.no_grad()
def make_equal(module: nn.Module, trained: Mapping[str, nn.Parameter], mesh: Mesh) -> None:
    """Frozen parameters and buffers become those of the first DP rank (trained parameters do so with their buckets)."""
    if mesh.dp.size == 1:
        return
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if name not in trained and tensor.numel():
            mesh.dp.broadcast(tensor.data, 0)


def shard(
    module: nn.Module,
    trained: Mapping[str, nn.Parameter],
    *,
    config: Any,
    mesh: Mesh,
    registry: LayoutRegistry,
    precision: Precision,
) -> GradientShards:
    """Bring the parameters into the form of the ZeRO stage. With one DP rank nothing is sharded, at any stage."""
    if config.zero.stage == 3 and mesh.dp.size > 1:
        return FsdpShards(module, trained, mesh=mesh, registry=registry, precision=precision)
    precision.cast(module, set(trained))
    return FlatShards(
        trained,
        stage=min(config.zero.stage, 2),
        mesh=mesh,
        registry=registry,
        precision=precision,
        bucket_size=config.zero.reduce_bucket_size,
    )
