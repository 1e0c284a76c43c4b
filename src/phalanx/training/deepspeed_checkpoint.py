"""Reads checkpoints that DeepSpeed has written, where they hold whole tensors:

    universal      zero/<parameter>/{fp32,exp_avg,exp_avg_sq,step}.pt     weights and AdamW's state
    consolidated   mp_rank_00_model_states.pt of one tensor-parallel rank, below stage 3     weights

Nothing is unpickled but tensors and plain values. What else DeepSpeed writes is refused, with the way to convert it.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from phalanx.training.checkpoint_folder import CheckpointError
from phalanx.training.fragments import by_parameter
from phalanx.training.fused_adam import kind_of
from phalanx.training.parts import parts
from phalanx.training.whole import held, tied_names

if TYPE_CHECKING:
    from phalanx.training.engine import TrainingEngine

_MODEL = "mp_rank_*_model_states.pt"
_OPTIMIZER = "*optim_states.pt"
_MOMENTS = ("exp_avg", "exp_avg_sq")
_CONVERT = "convert it with DeepSpeed's ds_to_universal.py"


def is_deepspeeds(path: Path) -> bool:
    """Whether a folder looks like a checkpoint of DeepSpeed's."""
    return (path / "zero").is_dir() or any(path.glob(_MODEL)) or any(path.glob(_OPTIMIZER))


def read(engine: TrainingEngine, path: Path, *, strict: bool, optimizer: bool) -> None:
    """The weights, and with `optimizer` the moments and steps, into what this rank owns; a tensor at a time.

    Raises CheckpointError, naming what was found, for what does not hold whole tensors or is of another model.
    """
    if (path / "zero").is_dir():
        _read_universal(engine, path, strict, optimizer)
    else:
        _read_consolidated(engine, path, strict, optimizer)


def _read_universal(engine: TrainingEngine, path: Path, strict: bool, optimizer: bool) -> None:
    there = {folder.name: folder for folder in (path / "zero").iterdir() if (folder / "fp32.pt").is_file()}
    # It holds what DeepSpeed has trained: frozen parameters stay as they are.
    _check_names(path, engine.trained_names, there.keys() - (engine.registry.keys() - engine.trained_names), strict)
    fragments = by_parameter(engine.fragments)
    for name, folder in there.items():
        if name not in engine.registry:
            continue
        _put(engine, name, _tensor(folder / "fp32.pt"))
        if not (optimizer and name in engine.trained_names):
            continue
        if engine.optimizer is None or kind_of(engine.optimizer) not in ("Adam", "AdamW"):
            raise CheckpointError(
                f"{path} holds the moments of Adam, and this run has {type(engine.optimizer).__name__}: use AdamW, or "
                "load with load_optimizer_states=False"
            )
        moments = {key: _tensor(folder / f"{key}.pt") for key in _MOMENTS}
        step = float(_load(folder / "step.pt"))
        for fragment in fragments.get(name, ()):
            state: dict[str, Any] = {"step": torch.tensor(step)}
            for key, whole in moments.items():
                state[key] = torch.empty_like(fragment.tensor, requires_grad=False)
                _fill(engine, name, fragment.start, state[key], whole)
            engine.optimizer.state[fragment.tensor] = state


def _read_consolidated(engine: TrainingEngine, path: Path, strict: bool, optimizer: bool) -> None:
    found = sorted(file.name for file in path.glob(_MODEL))
    if found != ["mp_rank_00_model_states.pt"]:
        what = ", ".join(found or sorted(file.name for file in path.iterdir())[:4])
        raise CheckpointError(
            f"{path} is a checkpoint of DeepSpeed's in pieces ({what}): only whole tensors are read; {_CONVERT}"
        )
    if optimizer and engine.optimizer is not None:
        raise CheckpointError(
            f"{path} is a checkpoint of DeepSpeed's whose optimizer state cannot be read as it is: load with "
            f"load_optimizer_states=False, or {_CONVERT}"
        )
    state = _load(path / found[0]).get("module")
    if not isinstance(state, Mapping) or not state:
        raise CheckpointError(f"{path / found[0]} holds no weights (ZeRO stage 3 keeps them elsewhere): {_CONVERT}")
    tied = tied_names(engine.module)
    weights = {name: value for name, value in state.items() if isinstance(value, Tensor) and name not in tied}
    buffers = {name: buffer for name, buffer in engine.module.named_buffers() if name in weights}
    _check_names(path, frozenset(engine.registry), weights.keys() - buffers.keys(), strict)
    for name, buffer in buffers.items():
        buffer.copy_(weights[name])
    for name in weights.keys() & engine.registry.keys():
        _put(engine, name, weights[name])


def _check_names(path: Path, here: Any, there: Any, strict: bool) -> None:
    missing, unknown = sorted(here - there), sorted(there - here)
    if strict and (missing or unknown):
        told = [f"{name} is not in it" for name in missing] + [f"{name} is not in the model" for name in unknown]
        raise CheckpointError(f"{path} is not of this model ({len(told)} differences): " + "; ".join(told[:10]))


def _put(engine: TrainingEngine, name: str, whole: Tensor) -> None:
    """A whole parameter into the master values, or where it is not trained, into the parameter."""
    shape = engine.registry[name].shape
    if tuple(whole.shape) != shape:
        raise CheckpointError(f"{name} is {list(whole.shape)} in the checkpoint and {list(shape)} in the model")
    for start, values in _places(engine, name):
        _fill(engine, name, start, values, whole)


def _places(engine: TrainingEngine, name: str) -> Iterator[tuple[int, Tensor]]:
    if name not in engine.trained_names:
        yield held(engine.module.get_parameter(name), engine.registry.local_shape(name), engine.mesh)
        return
    for fragment in engine.fragments:
        if fragment.name == name:
            yield fragment.start, fragment.tensor.data


def _fill(engine: TrainingEngine, name: str, start: int, values: Tensor, whole: Tensor) -> None:
    for box, part in parts(engine.registry, name, start, values):
        part.copy_(whole[box])


def _tensor(file: Path) -> Tensor:
    value = _load(file)
    value = value.get("param") if isinstance(value, Mapping) else value
    if not isinstance(value, Tensor):
        raise CheckpointError(f"{file} holds no tensor")
    return value


def _load(file: Path) -> Any:
    try:
        return torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except (OSError, RuntimeError, pickle.UnpicklingError) as error:
        raise CheckpointError(f"{file} cannot be read as tensors and plain values: {str(error)[:300]}") from None
