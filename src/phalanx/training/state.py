"""What a training run is at one moment, into a checkpoint and out of it; written by one grid of ranks, read by any.

Saved are the master weights and the optimizer's state of what is trained, the values of what is not, the schedule, the
loss scale, the counters and each rank's random state. Everything that is cut is saved as boxes of the whole tensor, so
tensor-parallel size, data-parallel size and ZeRO stage may change from one run to the next. The same grid goes on with
the same random numbers; another one is seeded anew, from the step and the data-parallel rank.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from phalanx.distributed.mesh import Mesh
from phalanx.parallel.adapters import base_model
from phalanx.training import deepspeed_checkpoint
from phalanx.training.checkpoint_folder import (
    CheckpointError,
    RankWriter,
    Saved,
    check_tag,
    commit,
    newest_tag,
    partial_folder,
)
from phalanx.training.fragments import by_parameter
from phalanx.training.fused_adam import kind_of
from phalanx.training.hf_names import class_name, json_of
from phalanx.training.parts import is_written_here, parts
from phalanx.training.random_state import go_on_drawing, random_state
from phalanx.training.same_data import warn_of_other_batches
from phalanx.training.together import Together, differ, place_among_all
from phalanx.training.whole import held, tied_names

if TYPE_CHECKING:
    from phalanx.training.engine import TrainingEngine

_log = logging.getLogger(__name__)

WRITING_SECONDS = 1800.0
"""How long rank 0 waits for the other ranks to have written."""


class Writing:
    """A checkpoint that is being written behind the training."""

    def __init__(self, *work: Callable[[], None]) -> None:
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, args=work, name="phalanx checkpoint")
        self._thread.start()

    def wait(self) -> None:
        """Returns when it is there. Raises what went wrong."""
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _run(self, *work: Callable[[], None]) -> None:
        try:
            for each in work:
                each()
        except Exception as error:
            # Said here too: a run may end without waiting.
            _log.error("an asynchronous checkpoint was not written: %s: %s", type(error).__name__, error)
            self._error = error


def save(
    engine: TrainingEngine,
    folder: Path,
    tag: str,
    client_state: Mapping[str, Any],
    *,
    latest: bool,
    exclude_frozen: bool,
    asynchronous: bool,
) -> Writing | None:
    """Writes a checkpoint; called by all ranks. Returns when it is there, or, asynchronous, what waits for it.

    Raises:
        CheckpointError, on all ranks: a tag that is no name or differs between ranks, state that cannot be saved, a
            rank that could not write. What was there before is untouched then.
    """
    mesh = engine.mesh
    rank, world = place_among_all(mesh)
    _check_same(mesh, "save under", tag)
    partial = partial_folder(folder, check_tag(tag))
    with Together(mesh, "preparing the folder"):
        if rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
    writer = RankWriter(partial, rank, keep=asynchronous)
    with Together(mesh, "collecting the state"):
        scalars = _collect(engine, writer, exclude_frozen)
        extra = {"tp": mesh.tp.rank, "dp": mesh.dp.rank, "scalars": scalars, "random": random_state(writer, mesh)}
        about = _about(engine, client_state, exclude_frozen) if rank == 0 else {}

    def finish() -> None:
        try:
            writer.finish(extra)
        except Exception as error:
            writer.fail(f"{type(error).__name__}: {error}")
            raise

    def publish() -> None:
        if rank == 0:
            commit(folder, tag, world, about, latest=latest, patience=WRITING_SECONDS)

    if differ(mesh, repr(client_state)) and rank == 0:
        _log.warning("the ranks' client_state is not the same: that of rank 0 is saved, for all of them")
    if asynchronous:
        return Writing(finish, publish)
    # One after the other: a rank whose disk is full may not even be able to leave a note for rank 0.
    try:
        with Together(mesh, "writing"):
            finish()
        with Together(mesh, "making the checkpoint visible"):
            publish()
    except BaseException:
        if rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
        raise
    return None


def load(
    engine: TrainingEngine,
    folder: Path,
    tag: str | None,
    *,
    strict: bool = True,
    optimizer: bool = True,
    scheduler: bool = True,
    module_only: bool = False,
) -> tuple[str | None, dict[str, Any] | None]:
    """Reads a checkpoint into the engine; called by all ranks. Returns its path and the client state, or (None, None)
    where no tag is given and the folder has no checkpoint.

    Args:
        strict: the checkpoint has exactly the parameters of the model; else, those that it lacks stay as they are.
        optimizer, scheduler: whether their states are read.
        module_only: the weights and nothing else, the counters included.

    Raises:
        CheckpointError, on all ranks: a checkpoint that is broken or of another model. Weights may be half read then.
    """
    mesh = engine.mesh
    with Together(mesh, f"looking for a checkpoint in {folder}"):
        tag = str(tag) if tag is not None else newest_tag(folder)
    _check_same(mesh, "load", tag)
    if tag is None:
        _log.warning("%s has no checkpoint (no file called latest): nothing is loaded", folder)
        return None, None
    path = folder / check_tag(tag)
    if not (path / "index.json").is_file() and deepspeed_checkpoint.is_deepspeeds(path):
        with Together(mesh, f"loading {path}"):
            deepspeed_checkpoint.read(engine, path, strict=strict, optimizer=optimizer and not module_only)
        engine.refresh_parameters()
        return str(path), {}
    with Together(mesh, f"loading {path}"), Saved(path) as saved:
        _check_model(engine, saved, strict)
        _read_weights(engine, saved)
        if optimizer and not module_only and engine.optimizer is not None:
            _read_optimizer(engine, saved)
    engine.refresh_parameters()
    index = saved.index
    if index["tp"] == mesh.tp.size and index["rules"] != _rules_mark(engine):
        _log.info("%s was cut by other rules than this run is; its tensors are whole, so it goes on", path)
    if module_only:
        return str(path), index["client_state"]
    if scheduler and engine.lr_scheduler is not None and index["lr_scheduler"] is not None:
        engine.lr_scheduler.load_state_dict(index["lr_scheduler"])
    engine.loss_scaler.load_state_dict(index["loss_scaler"])
    engine.global_steps, engine.skipped_steps = index["global_steps"], index["skipped_steps"]
    # Gradients are not saved: the passes of a step that was not over are run again, as many as this run needs.
    engine.micro_steps = engine.global_steps * engine.gradient_accumulation_steps()
    warn_of_other_batches(engine, path, index)
    go_on_drawing(engine.mesh, path, index)
    return str(path), index["client_state"]


# Saving.


def _collect(engine: TrainingEngine, writer: RankWriter, exclude_frozen: bool) -> dict[str, dict[str, Any]]:
    """Gives the writer all that this rank saves; returns what is one number a parameter."""
    registry, mesh = engine.registry, engine.mesh
    writes = mesh.dp.rank == 0
    scalars: dict[str, dict[str, Any]] = {}
    owners = engine.fragments if engine.fragments_are_shared_out or writes else []
    for fragment in owners:
        shape = registry[fragment.name].shape
        for entry, values in [("master", fragment.tensor), *_states(engine, fragment, scalars)]:
            for box, part in parts(registry, fragment.name, fragment.start, values):
                if is_written_here(registry, fragment.name, box):
                    writer.add(f"{entry}/{fragment.name}", shape, box, part)
    trained = engine.trained_names
    for name, parameter in engine.module.named_parameters():
        if name in trained or exclude_frozen:
            continue
        start, values = held(parameter, registry.local_shape(name), mesh)
        if not (writes or isinstance(parameter, DTensor)):
            continue
        for box, part in parts(registry, name, start, values):
            if is_written_here(registry, name, box):
                writer.add(f"model/{name}", registry[name].shape, box, part)
    if writes and mesh.tp.rank == 0:
        for name, buffer in _buffers(engine):
            writer.add(f"buffer/{name}", tuple(buffer.shape), tuple(slice(0, n) for n in buffer.shape), buffer)
    return scalars


def _states(engine: TrainingEngine, fragment: Any, scalars: dict[str, dict[str, Any]]) -> Iterator[tuple[str, Tensor]]:
    """The optimizer's tensors of a fragment, each under the name of its entry; single numbers go to `scalars`."""
    state = {} if engine.optimizer is None else engine.optimizer.state.get(fragment.tensor, {})
    for key, value in state.items():
        if key != "step" and isinstance(value, Tensor) and value.shape == fragment.tensor.shape:
            yield f"optimizer/{key}", value
        elif isinstance(value, Tensor) and value.numel() == 1:
            number = {"dtype": str(value.dtype).removeprefix("torch."), "value": value.item()}
            scalars.setdefault(fragment.name, {})[key] = number
        elif value is None or isinstance(value, (bool, int, float, str)):
            scalars.setdefault(fragment.name, {})[key] = {"dtype": None, "value": value}
        else:
            what = f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise CheckpointError(
                f"{type(engine.optimizer).__name__} keeps {key!r} of {fragment.name} as {what}: only states with the "
                f"shape of the parameter ({tuple(fragment.tensor.shape)}) and single numbers can be saved"
            )


def _about(engine: TrainingEngine, client_state: Mapping[str, Any], exclude_frozen: bool) -> dict[str, Any]:
    if not isinstance(client_state, Mapping):
        raise CheckpointError(f"client_state is a dict of JSON values, given {type(client_state).__name__}")
    scheduler = engine.lr_scheduler
    model = base_model(engine.module)
    config = json_of(getattr(model, "config", None))
    return {
        "tp": engine.mesh.tp.size,
        "dp": engine.mesh.dp.size,
        "stage": engine.zero_optimization_stage(),
        "rules": _rules_mark(engine),
        "model_config": None if config is None else {**config, "architectures": [class_name(model)]},
        "generation_config": json_of(getattr(model, "generation_config", None)),
        "frozen_excluded": exclude_frozen,
        "tied": tied_names(engine.module),
        "optimizer": None if engine.optimizer is None else kind_of(engine.optimizer),
        "param_groups": [
            {key: _number(value) for key, value in group.items() if key not in _NOT_SAVED}
            for group in ([] if engine.optimizer is None else engine.optimizer.param_groups)
        ],
        "lr_scheduler": None if scheduler is None else scheduler.state_dict(),
        "loss_scaler": engine.loss_scaler.state_dict(),
        "train_batch_size": engine.train_batch_size(),
        "global_steps": engine.global_steps,
        "skipped_steps": engine.skipped_steps,
        "client_state": dict(client_state),
    }


# How a step is computed, not what it computes: the next run may be on another device.
_NOT_SAVED = ("params", "param_names", "fused", "foreach", "capturable", "differentiable")


def _number(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value


def _rules_mark(engine: TrainingEngine) -> str:
    """A hash of how every parameter is cut, however many ranks there are."""
    cuts = {name: layout.partition.to_json() for name, layout in sorted(engine.registry.items())}
    return hashlib.sha256(json.dumps(cuts, sort_keys=True).encode()).hexdigest()


def _buffers(engine: TrainingEngine) -> Iterator[tuple[str, Tensor]]:
    """Those that belong to the model's state."""
    kept = engine.module.state_dict().keys()
    return ((name, buffer) for name, buffer in engine.module.named_buffers() if name in kept)


# Loading.


def _check_model(engine: TrainingEngine, saved: Saved, strict: bool) -> None:
    """Raises CheckpointError where the checkpoint is of another model, naming everything that differs."""
    there = _saved_parameters(saved)
    here = {name: layout.shape for name, layout in engine.registry.items()}
    problems = [
        f"{name} is {list(there[name])} in the checkpoint and {list(shape)} in the model"
        for name, shape in here.items()
        if name in there and there[name] != shape
    ]
    if strict:
        left_out = here.keys() - engine.trained_names if saved.index.get("frozen_excluded") else set()
        for name in here.keys() - there.keys() - left_out:
            near = get_close_matches(name, there, 1)
            problems.append(f"{name} is not in the checkpoint" + (f"; the nearest there is {near[0]}" if near else ""))
        problems += [f"{name} of the checkpoint is not in the model" for name in there.keys() - here.keys()]
    if problems:
        listed = "\n  ".join(sorted(problems)[:20])
        raise CheckpointError(f"{saved.path} is not of this model ({len(problems)} differences):\n  {listed}")


def _saved_parameters(saved: Saved) -> dict[str, tuple[int, ...]]:
    """The whole shape of each parameter that is saved."""
    found = {}
    for entry in saved.entries:
        kind, _, name = entry.partition("/")
        if kind in ("master", "model"):
            found[name] = saved.shape(entry)
    return found


def _read_weights(engine: TrainingEngine, saved: Saved) -> None:
    registry, mesh = engine.registry, engine.mesh
    places = [(f.name, f.start, f.tensor.data) for f in engine.fragments]
    trained = engine.trained_names
    for name, parameter in engine.module.named_parameters():
        if name not in trained:
            places.append((name, *held(parameter, registry.local_shape(name), mesh)))
    for name, start, values in places:
        entry = next((e for e in (f"master/{name}", f"model/{name}") if e in saved.entries), None)
        if entry is not None:
            _fill(engine, saved, entry, name, start, values)
    for name, buffer in _buffers(engine):
        entry = f"buffer/{name}"
        if entry in saved.entries and saved.shape(entry) == tuple(buffer.shape):
            buffer.copy_(saved.read(entry))


def _fill(engine: TrainingEngine, saved: Saved, entry: str, name: str, start: int, values: Tensor) -> None:
    for box, part in parts(engine.registry, name, start, values):
        saved.read_into(part, entry, box)


def _read_optimizer(engine: TrainingEngine, saved: Saved) -> None:
    optimizer, index = engine.optimizer, saved.index
    if optimizer is None:
        return
    if index["optimizer"] != kind_of(optimizer):
        raise CheckpointError(
            f"{saved.path} holds the state of {index['optimizer']}, this run has {kind_of(optimizer)}: use the "
            "same optimizer, or load with load_optimizer_states=False"
        )
    groups = index["param_groups"]
    if len(groups) != len(optimizer.param_groups):
        raise CheckpointError(
            f"{saved.path} has {len(groups)} param groups, this optimizer {len(optimizer.param_groups)}: make them the "
            "same, or load with load_optimizer_states=False"
        )
    for group, told in zip(optimizer.param_groups, groups, strict=True):
        group.update({key: tuple(v) if isinstance(group.get(key), tuple) else v for key, v in told.items()})
    keys = dict.fromkeys(entry.split("/")[1] for entry in saved.entries if entry.startswith("optimizer/"))
    scalars: dict[str, Any] = {}
    for rank in index["ranks"]:
        scalars.update(rank["scalars"])
    on_device = {id(p) for g in optimizer.param_groups if g.get("fused") or g.get("capturable") for p in g["params"]}
    for name, fragments in by_parameter(engine.fragments).items():
        for fragment in fragments:
            state: dict[str, Any] = {}
            for key, told in scalars.get(name, {}).items():
                device = fragment.tensor.device if id(fragment.tensor) in on_device else "cpu"
                number, value = told["dtype"], told["value"]
                if number is not None:
                    value = torch.tensor(value, dtype=getattr(torch, number), device=device)
                state[key] = value
            for key in keys:
                entry = f"optimizer/{key}/{name}"
                if entry in saved.entries:
                    kind, master = saved.dtype(entry), f"master/{name}"
                    # What had the dtype of the weights has it again: optimizers compute both together.
                    if master in saved.entries and kind == saved.dtype(master):
                        kind = fragment.tensor.dtype
                    values = torch.empty_like(fragment.tensor, dtype=kind, requires_grad=False)
                    _fill(engine, saved, entry, name, fragment.start, values)
                    state[key] = values
            optimizer.state.pop(fragment.tensor, None)
            if state:
                optimizer.state[fragment.tensor] = state


# Ranks together.


def _check_same(mesh: Mesh, what: str, tag: str | None) -> None:
    if differ(mesh, tag):
        raise CheckpointError(
            f"the ranks {what} different tags, this one {tag!r}: give all the same, and one folder that all see"
        )
