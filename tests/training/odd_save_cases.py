"""Tags, precision and settings that differ: between ranks, or between the run that saves and the one that loads."""

from __future__ import annotations

import logging
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from phalanx.training.checkpoint_folder import CheckpointError
from tests.training.family_cases import language_loss
from tests.training.loops import engine_loop
from tests.training.reshard_cases import batches, build, engine_of

SECONDS = 10
NARROW = {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
PRECISIONS: dict[str, dict[str, Any]] = {
    "float32": {},
    "bf16": {"bf16": {"enabled": True}},
    "narrow": {"bf16": NARROW},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 6}},
    "static": {"fp16": {"enabled": True, "loss_scale": 32}},
}
SCALES = {"fp16": 64.0, "static": 32.0}


def case_ranks_that_name_different_checkpoints() -> None:
    folder, rank = Path(sys.argv[3]) / "tags", dist.get_rank()
    engine = engine_of(build("llama", 0), 2, 1, 1)
    engine.save_checkpoint(folder, "a")
    engine.save_checkpoint(folder, "b")
    began = time.monotonic()
    for tags in (("c", "d"), ("c", "x/y")):
        with pytest.raises(CheckpointError, match="save under different tags"):
            engine.save_checkpoint(folder, tags[rank])
    for tags in (("a", "b"), ("a", "x/y")):
        with pytest.raises(CheckpointError, match="load different tags"):
            engine.load_checkpoint(folder, tags[rank])
    with pytest.raises(CheckpointError, match="one folder that all see"):
        engine.load_checkpoint(folder if rank == 0 else folder / "elsewhere")
    for tag in ("", ".hidden", "end ", "two\nlines", "x" * 300, "latest"):
        with pytest.raises(CheckpointError, match="the name of a folder"):
            engine.save_checkpoint(folder, tag)
    for state in (None, [1]):
        with pytest.raises(CheckpointError, match=r"client_state is a dict|another rank"):
            engine.save_checkpoint(folder, "c", client_state=state)
    assert time.monotonic() - began < SECONDS
    assert engine.load_checkpoint(folder)[0] == str(folder / "b")
    engine.destroy()


class Said(logging.Handler):
    """`with Said() as lines:` what the library warns of."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())

    def __enter__(self) -> list[str]:
        logging.getLogger("phalanx").addHandler(self)
        return self.lines

    def __exit__(self, *error: Any) -> None:
        logging.getLogger("phalanx").removeHandler(self)


def case_the_client_state_is_that_of_rank_0() -> None:
    folder, rank = Path(sys.argv[3]) / "client", dist.get_rank()
    engine = engine_of(build("llama", 0), 2, 1, 1)
    with Said() as lines:
        engine.save_checkpoint(folder, client_state={"epoch": 3})
    assert not lines
    with Said() as lines:
        engine.save_checkpoint(folder, client_state={"epoch": 3, "rank": rank})
    assert ["that of rank 0 is saved" in line for line in lines] == [True] * (rank == 0)
    assert engine.load_checkpoint(folder)[1] == {"epoch": 3, "rank": 0}
    engine.destroy()


def case_another_batch_size_is_said() -> None:
    folder = Path(sys.argv[3]) / "batches"
    engine = engine_of(build("llama", 0), 1, 2, 1)
    size = engine.train_batch_size()
    engine.save_checkpoint(folder)
    engine.destroy()
    for tp, dp, factor in ((2, 1, 1), (1, 2, 3)):
        engine = engine_of(build("llama", 1), tp, dp, 1, train_micro_batch_size_per_gpu=2 * factor)
        with Said() as lines:
            engine.load_checkpoint(folder)
        said = f"saved with a train_batch_size of {size}, and this run has {factor * size}"
        assert [said in line for line in lines] == [True] * (factor != 1), lines
        with Said() as lines:
            engine.load_checkpoint(folder, load_module_only=True)
        assert not lines
        engine.destroy()


def case_another_precision_goes_on() -> None:
    folder, steps = Path(sys.argv[3]) / "precision", batches(1003)
    for name, config in PRECISIONS.items():
        engine = engine_of(build("llama", 0), 2, 1, 1, **config)
        engine_loop(engine, language_loss, steps[:2])
        engine.save_checkpoint(folder, name)
        engine.destroy()
    for name, config in PRECISIONS.items():
        for saved in PRECISIONS:
            engine = engine_of(build("llama", 1), 2, 1, 1, **config)
            engine.load_checkpoint(folder, saved)
            assert engine.loss_scaler.scale == SCALES.get(name, 1.0), (name, saved)
            assert engine.loss_scaler.guarded == (name in SCALES)
            for fragment in engine.fragments:
                moments = engine.optimizer.state[fragment.tensor]["exp_avg"]
                assert moments.dtype == fragment.tensor.dtype == (torch.bfloat16 if name == "narrow" else torch.float32)
            run = engine_loop(engine, language_loss, steps[2:3])
            assert abs(run.losses[0] - float32_loss(folder, steps)) < 0.1
            engine.destroy()


_EXPECTED: dict[Path, float] = {}


def float32_loss(folder: Path, steps: Any) -> float:
    """The loss of the step after the saved ones, where all is float32."""
    if folder not in _EXPECTED:
        engine = engine_of(build("llama", 1), 2, 1, 1)
        engine.load_checkpoint(folder, "float32")
        _EXPECTED[folder] = engine_loop(engine, language_loss, steps[2:3]).losses[0]
        engine.destroy()
    return _EXPECTED[folder]
