"""Ranks that cannot write: all ranks are told within seconds, and the checkpoint before stays."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from phalanx.training import checkpoint_folder
from phalanx.training.checkpoint_folder import CheckpointError, newest_tag
from tests.training.family_cases import language_loss
from tests.training.loops import engine_loop
from tests.training.odd_save_cases import Said
from tests.training.reshard_cases import batches, build, engine_of

SECONDS = 10


def full_disk(*args: Any) -> None:
    raise OSError(28, "No space left on device")


def check(bad_rank: int, broken: tuple[str, ...], asynchronous: bool) -> None:
    folder = Path(sys.argv[3]) / f"{bad_rank}-{len(broken)}-{asynchronous}"
    engine = engine_of(build("llama", 0), 2, 1, 1)
    steps = batches(1003)
    engine_loop(engine, language_loss, steps[:1])
    engine.save_checkpoint(folder)
    engine_loop(engine, language_loss, steps[1:2])
    began = time.monotonic()
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == bad_rank:
            for name in broken:
                patch.setattr(checkpoint_folder, name, full_disk)
        error = OSError if dist.get_rank() == bad_rank else CheckpointError
        if asynchronous:
            engine.save_checkpoint(folder, asynchronous=True)
            with pytest.raises((OSError, CheckpointError)):
                engine.save_checkpoint(folder, "next")
        else:
            with pytest.raises(error, match=r"No space left|another rank has failed"):
                engine.save_checkpoint(folder)
    assert time.monotonic() - began < SECONDS
    dist.barrier()
    assert newest_tag(folder) == "global_step1" and not (folder / "global_step2").exists()
    assert asynchronous or sorted(path.name for path in folder.iterdir()) == ["global_step1", "latest"]
    engine_loop(engine, language_loss, steps[2:3])  # the ranks are in step still
    engine.load_checkpoint(folder)
    assert engine.global_steps == 1
    engine.save_checkpoint(folder, "again")
    assert newest_tag(folder) == "again"
    engine.destroy()


def case_a_full_disk() -> None:
    for bad_rank in (0, 1):
        check(bad_rank, ("save_file",), False)
        # Not even a note can be written.
        check(bad_rank, ("save_file", "write_text"), False)
        check(bad_rank, ("save_file",), True)


def case_an_engine_that_goes_waits_for_its_checkpoint() -> None:
    for fails in (False, True):
        folder = Path(sys.argv[3]) / f"gone-{fails}"
        engine = engine_of(build("llama", 0), 2, 1, 1)
        engine_loop(engine, language_loss, batches(1003)[:1])
        with pytest.MonkeyPatch.context() as patch, Said() as lines:
            if fails:
                patch.setattr(checkpoint_folder, "save_file", full_disk)
            engine.save_checkpoint(folder, asynchronous=True)
            if fails:
                with pytest.raises((OSError, CheckpointError), match="No space left"):
                    engine.destroy()
            else:
                engine.destroy()
        assert [line for line in lines if "was not written" in line and "No space left" in line] or not fails
        dist.barrier()
        assert newest_tag(folder) == (None if fails else "global_step1")
