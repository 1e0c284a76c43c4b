"""The call surface of DeepSpeed's training: `import phalanx as deepspeed`.

What each call means is DeepSpeed's; what DeepSpeed accepts and then does otherwise (a contradicting mpu, a config that
names one size and a model that was promised another) is refused. `docs/deepspeed.md` lists the differences.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import Dataset

from phalanx.distributed.mesh import Mesh
from phalanx.training.accelerator import get_accelerator
from phalanx.training.comm import DEFAULT_PORT, init_distributed
from phalanx.training.config import TrainingConfig
from phalanx.training.config_text import load_config
from phalanx.training.cutting import cut
from phalanx.training.dataloader import ShardedLoader
from phalanx.training.engine import TrainingEngine
from phalanx.training.given_groups import Ranks, TPRequest, check_group, check_mpu
from phalanx.training.optimizers import optimizer_maker
from phalanx.training.schedules import schedule_maker

__all__ = [
    "DeepSpeedEngine",
    "add_config_arguments",
    "get_accelerator",
    "init_distributed",
    "initialize",
    "set_autotp_mode",
    "tp_model_init",
]

_log = logging.getLogger(__name__)

Config = Mapping[str, Any] | str | os.PathLike[str]
Parameters = Iterable[torch.Tensor] | Iterable[dict[str, Any]]

DeepSpeedEngine = TrainingEngine
"""The engine that `initialize` returns, under DeepSpeed's name."""


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: Optimizer | Callable[[Any], Optimizer] | None = None,
    model_parameters: Parameters | None = None,
    training_data: Dataset[Any] | None = None,
    lr_scheduler: Any = None,
    distributed_port: int = DEFAULT_PORT,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    config: Config | None = None,
    mesh_param: Any = None,
    config_params: Config | None = None,
) -> tuple[TrainingEngine, Optimizer | None, ShardedLoader | None, Any]:
    """Cut the model over ranks, shard its training state, and return what the loop needs; called by all ranks.

    Args:
        args: parsed arguments; `deepspeed_config` is read if no `config` is given, `local_rank` is checked.
        model: the whole model, the same on all ranks. It is changed in place; its Parameter objects stay the same.
        optimizer: a new torch optimizer over the model's parameters, or what makes one of `model_parameters`. It goes
            before the config's.
        model_parameters: what the config's optimizer trains, parameters or param groups; default: all that require a
            gradient.
        training_data: a map-style dataset, from which a loader for this data-parallel rank is made.
        lr_scheduler: stepped after each update; or what makes one of an optimizer. It goes before the config's.
        distributed_port: where rank 0 listens, if the ranks have not met yet and MASTER_PORT is not set.
        mpu: an object that knows its groups of ranks (`get_{model,data}_parallel_{rank,group,world_size}`); checked.
        dist_init_required: False to not start `torch.distributed`.
        collate_fn: of the loader.
        config: a DeepSpeed config, as a dict (never changed), the path of a JSON file, or base64.
        mesh_param: not supported.
        config_params: the old name of `config`.

    Returns:
        The engine, its optimizer, the loader of `training_data` or None, and the schedule or None.

    Raises:
        ValueError: a config, mpu, `tp_model_init` or rules that cannot be followed or contradict one another.
        TypeError: what is no model, optimizer or dataset.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"initialize needs model=, an nn.Module, given {type(model).__name__}")
    if mesh_param is not None:
        raise ValueError("mesh_param is for Ulysses sequence parallelism, which is not supported; leave it out")
    _check_local_rank(args)
    given = load_config(_the_config(args, config, config_params))
    request = TPRequest.take(model)
    if request is not None:
        request.merge_into(given)
    if dist_init_required is not None or "RANK" in os.environ:
        init_distributed(distributed_port=distributed_port, dist_init_required=dist_init_required)
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    settings = TrainingConfig.read(given, world_size=world)
    if rank == 0:
        settings.log_hints()
        if settings.dump_state:
            _log.info("training config: %s", json.dumps(settings.given, indent=2, default=str))

    _check_same_config(given, rank, world)
    ranks = Ranks.of(rank, world, settings.tp_size)
    if mpu is not None:
        check_mpu(mpu, ranks)
    check_group(settings.tensor_parallel.tp.tp_group, ranks.tp, "tensor_parallel.tp.tp_group")
    if request is not None and request.group is not None and sorted(request.group) != sorted(ranks.tp):
        raise ValueError(
            f"tp_model_init was given a tp_group of the ranks {list(request.group)}, but with autotp_size "
            f"{settings.tp_size} this rank shares its model with {list(ranks.tp)}"
        )
    make_optimizer = _optimizer_maker(optimizer, settings)
    make_schedule = _schedule_maker(lr_scheduler, settings)
    if make_schedule is not None and make_optimizer is None:
        raise ValueError("a schedule needs an optimizer: pass optimizer=, or name one in the config")
    trained = None if model_parameters is None else list(model_parameters)

    mesh = Mesh.build(settings.tp_size)
    registry = cut(model, mesh, settings)
    # Made after the cut, from Parameters that are still the same objects.
    if trained is None:
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    made = None if make_optimizer is None else make_optimizer(trained)
    schedule = None if make_schedule is None else make_schedule(made)
    engine = TrainingEngine(
        model, config=settings, mesh=mesh, registry=registry, optimizer=made, lr_scheduler=schedule, mpu=mpu
    )
    loader = None
    if training_data is not None:
        loader = ShardedLoader(
            training_data,
            mesh,
            batch_size=settings.train_micro_batch_size_per_gpu,
            drop_last=settings.dataloader_drop_last,
            collate_fn=collate_fn,
        )
    return engine, engine.optimizer, loader, engine.lr_scheduler


def tp_model_init(
    model: nn.Module,
    tp_size: int,
    dtype: torch.dtype | None = None,
    config: Config | None = None,
    tp_group: dist.ProcessGroup | None = None,
) -> nn.Module:
    """Say that the next `initialize` of this model cuts it over `tp_size` ranks; the model is returned as it is.

    `dtype` must be the one that the config enables, if it enables one; `tp_group` must hold the ranks that share the
    model. Unlike DeepSpeed's, what is said here holds for this model only, and once.

    Raises ValueError where it contradicts `config`, an earlier call for the model, or the size of `tp_group`.
    """
    if not isinstance(tp_size, int) or isinstance(tp_size, bool) or tp_size < 1:
        raise ValueError(f"tp_size is a number of ranks, at least 1, given {tp_size!r}")
    group = None if tp_group is None else tuple(dist.get_process_group_ranks(tp_group))
    if group is not None and len(group) != tp_size:
        raise ValueError(f"tp_group has {len(group)} ranks, but tp_size is {tp_size}")
    request = TPRequest(tp_size, dtype, group)
    if config is not None:
        request.merge_into(load_config(config))
    request.record(model)
    return model


def set_autotp_mode(training: bool = False) -> None:
    """For scripts that say what they do: training is all that `initialize` does. Raises ValueError for inference."""
    if not training:
        raise ValueError("set_autotp_mode(training=False) is for inference: serve the model with phalanx.LLM instead")


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add `--deepspeed` (a flag for the script's own use) and `--deepspeed_config` (a path) to a parser."""
    group = parser.add_argument_group("DeepSpeed", "DeepSpeed configurations")
    group.add_argument("--deepspeed", default=False, action="store_true", help="a flag for the script's own use")
    group.add_argument("--deepspeed_config", default=None, type=str, help="path of a DeepSpeed config (JSON)")
    return parser


def _the_config(args: Any, config: Config | None, config_params: Config | None) -> Config:
    """The one config that was given."""
    places = {
        "config": config,
        "config_params": config_params,
        "args.deepspeed_config": getattr(args, "deepspeed_config", None),
    }
    found = {place: value for place, value in places.items() if value is not None}
    if not found:
        raise ValueError("initialize needs a DeepSpeed config: pass config=, or args with deepspeed_config")
    if len(found) > 1:
        raise ValueError(f"a DeepSpeed config was given by {' and by '.join(found)}; give one")
    return next(iter(found.values()))


def _check_same_config(given: Mapping[str, Any], rank: int, world: int) -> None:
    """Raise ValueError on every rank if they were not all given one config."""
    if world == 1:
        return
    told: list[Any] = [None] * world
    # Objects, such as groups of ranks, are told by their kind: their names differ from process to process.
    mine = {key: json.dumps(value, sort_keys=True, default=lambda x: type(x).__name__) for key, value in given.items()}
    dist.all_gather_object(told, mine)
    for other, theirs in enumerate(told):
        if theirs != told[0]:
            keys = sorted(key for key in {*theirs, *told[0]} if theirs.get(key) != told[0].get(key))
            raise ValueError(
                f"the ranks were given different configs: rank {other} says "
                f"{', '.join(f'{key}: {theirs.get(key)}' for key in keys)}; rank 0 says "
                f"{', '.join(f'{key}: {told[0].get(key)}' for key in keys)}. Give all of them the same"
            )


def _check_local_rank(args: Any) -> None:
    said, set_by_launcher = getattr(args, "local_rank", None), os.environ.get("LOCAL_RANK")
    if isinstance(said, int) and said >= 0 and set_by_launcher not in (None, str(said)):
        raise ValueError(f"args.local_rank is {said}, but the launcher set LOCAL_RANK={set_by_launcher}")


def _optimizer_maker(given: Any, settings: TrainingConfig) -> Callable[[list[Any]], Optimizer] | None:
    """What makes the optimizer: the caller's goes before the config's."""
    named = settings.optimizer
    if given is None:
        return None if named is None else optimizer_maker(named.type, named.params)
    if named is not None:
        _log.warning("initialize was given an optimizer: the config's optimizer (%s) is not used", named.type)
    if isinstance(given, Optimizer):
        return lambda _: given
    if not callable(given):
        raise TypeError(f"optimizer is a torch.optim.Optimizer or what makes one, given {type(given).__name__}")

    def make(parameters: list[Any]) -> Optimizer:
        made = given(parameters)
        if not isinstance(made, Optimizer):
            raise TypeError(f"optimizer= returned a {type(made).__name__}, not a torch.optim.Optimizer")
        return made

    return make


def _schedule_maker(given: Any, settings: TrainingConfig) -> Callable[[Any], Any] | None:
    """What makes the schedule: the caller's goes before the config's."""
    named = settings.scheduler
    if given is None:
        return None if named is None else schedule_maker(named.type, named.params)
    if named is not None:
        _log.warning("initialize was given an lr_scheduler: the config's scheduler (%s) is not used", named.type)
    if callable(given):
        return given

    def check(optimizer: Optimizer) -> Any:
        held = getattr(given, "optimizer", optimizer)
        if isinstance(held, Optimizer) and held is not optimizer:
            raise ValueError(
                "lr_scheduler holds another optimizer than the one that trains: pass that optimizer too, or a function "
                "that makes the schedule of an optimizer"
            )
        return given

    return check
