"""Whole tensors of a model whose parameters are cut over ranks, one at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from phalanx.distributed.mesh import Mesh
from phalanx.layout import local_shape, merge
from phalanx.training.fragments import by_parameter
from phalanx.training.parts import is_written_here, parts
from phalanx.training.together import Together

if TYPE_CHECKING:
    from phalanx.training.engine import TrainingEngine


def tied_names(module: nn.Module) -> dict[str, str]:
    """The further names of parameters that have several -> the first one, under which they are saved."""
    first = {id(parameter): name for name, parameter in module.named_parameters()}
    every = module.named_parameters(remove_duplicate=False)
    return {name: first[id(parameter)] for name, parameter in every if first[id(parameter)] != name}


def whole_tensors(
    engine: TrainingEngine, *, exclude_frozen: bool = False, only: Sequence[str] | None = None
) -> Iterator[tuple[str, Tensor | None]]:
    """The parameters and persistent buffers of the engine's module, whole and on the CPU, one after the other: on rank
    0 of all; None beside the name on the others. A tied parameter comes once. All ranks run it to its end together.

    Args:
        exclude_frozen: leave out parameters that are not trained.
        only: these names alone.
    """
    module, registry, mesh = engine.module, engine.registry, engine.mesh
    tied = tied_names(module)
    frozen = {name for name, _ in module.named_parameters()} - engine.trained_names if exclude_frozen else set()
    left_out = tied.keys() | frozen
    for name, value in module.state_dict().items():
        if name in left_out or not isinstance(value, Tensor) or (only is not None and name not in only):
            continue
        local = engine.whole_over_copies(name, value).detach()
        if mesh.dp.rank:
            yield name, None
        elif name not in registry or registry[name].partition.kind == "replicate" or mesh.tp.size == 1:
            yield name, local.cpu() if mesh.tp.rank == 0 else None
        else:
            layout = registry[name]
            shapes = [local_shape(layout.partition, layout.shape, rank, mesh.tp.size) for rank in range(mesh.tp.size)]
            counts = [prod(shape) for shape in shapes]
            shards = mesh.tp.all_gather(local.reshape(-1), 0, counts).split(counts)
            if mesh.tp.rank:
                yield name, None
                continue
            on_cpu = [part.cpu().view(shape) for part, shape in zip(shards, shapes, strict=True)]
            yield name, merge(on_cpu, layout.partition, layout.shape)


@contextmanager
def gathered_parameters(
    engine: TrainingEngine, params: Sequence[str | nn.Parameter], modifier_rank: int | None
) -> Iterator[Mapping[str, Tensor]]:
    """See `TrainingEngine.gathered_parameters`."""
    mesh = engine.mesh
    world = mesh.tp.size * mesh.dp.size
    if modifier_rank is not None and not 0 <= modifier_rank < world:
        raise ValueError(f"modifier_rank is one of the ranks 0 to {world - 1}, or None, given {modifier_rank}")
    names = _names(engine, params)
    places = _places(engine, names)
    found = {name: _summed(engine, name, places[name]) for name in names}
    with Together(mesh, "changing gathered parameters"):
        yield found
    if modifier_rank is None:
        return
    copy, shard = divmod(modifier_rank, mesh.tp.size)
    for name, whole in found.items():
        mesh.tp.broadcast(whole, shard)
        mesh.dp.broadcast(whole, copy)
        with torch.no_grad():
            for start, values in places[name]:
                for box, part in parts(engine.registry, name, start, values):
                    part.copy_(whole[box])
    engine.refresh_parameters()


def _names(engine: TrainingEngine, params: Sequence[str | nn.Parameter]) -> list[str]:
    every = dict(engine.module.named_parameters(remove_duplicate=False))
    tied = tied_names(engine.module)
    by_id = {id(parameter): name for name, parameter in every.items()}
    found = []
    for given in params:
        name = given if isinstance(given, str) else by_id.get(id(given))
        if name is None or name not in every:
            told = repr(given) if isinstance(given, str) else f"a tensor of shape {tuple(given.shape)}"
            raise ValueError(
                f"{told} is no parameter of the engine's module: give names as module.named_parameters() has them "
                "(at ZeRO stage 3 the parameters are other objects than before the engine was made)"
            )
        found.append(tied.get(name, name))
    return list(dict.fromkeys(found))


def _places(engine: TrainingEngine, names: Sequence[str]) -> dict[str, list[tuple[int, Tensor]]]:
    """What this rank owns of each parameter: from which element of its shard on, and the values (the master ones)."""
    owned = by_parameter(engine.fragments)
    named = dict(engine.module.named_parameters())
    found = {}
    for name in names:
        if name in engine.trained_names:
            found[name] = [(fragment.start, fragment.tensor.data) for fragment in owned.get(name, [])]
        else:
            found[name] = [held(named[name], engine.registry.local_shape(name), engine.mesh)]
    return found


def held(parameter: Tensor, shape: tuple[int, ...], mesh: Mesh) -> tuple[int, Tensor]:
    """What this rank holds of a parameter that is not trained: from which element of its shard on, and the values."""
    if not isinstance(parameter, DTensor):
        return 0, parameter.data
    local = parameter.to_local().detach()
    rows = -(-shape[0] // mesh.dp.size)
    return mesh.dp.rank * rows * (local.numel() // max(local.shape[0], 1)), local


def _summed(engine: TrainingEngine, name: str, places: Sequence[tuple[int, Tensor]]) -> Tensor:
    """The whole of a parameter on every rank: the sum of what each is the first to own, and zeros."""
    registry, mesh = engine.registry, engine.mesh
    parameter = engine.module.get_parameter(name)
    shared_out = engine.fragments_are_shared_out if name in engine.trained_names else isinstance(parameter, DTensor)
    wide = torch.float32 if name in engine.trained_names and parameter.dtype.itemsize < 4 else parameter.dtype
    total = torch.zeros(registry[name].shape, dtype=wide, device=mesh.device)
    if shared_out or mesh.dp.rank == 0:
        for start, values in places:
            for box, part in parts(registry, name, start, values):
                if is_written_here(registry, name, box):
                    total[box] = part
    return mesh.dp.all_reduce(mesh.tp.all_reduce(total))
