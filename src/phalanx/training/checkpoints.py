"""What of the training engine writes a run and goes on from one."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from phalanx.training.state import Writing, load, save
from phalanx.training.together import Together


class Checkpoints:
    """Methods of `TrainingEngine`."""

    _writing: Writing | None = None

    def save_checkpoint(
        self,
        save_dir: str | os.PathLike[str],
        tag: str | None = None,
        client_state: Mapping[str, Any] = MappingProxyType({}),
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
        asynchronous: bool = False,
    ) -> bool:
        """Write all that the run needs to go on into `save_dir/tag`; called by all ranks, which see one folder.

        The checkpoint is there whole or not at all, and one that it replaces stays until then.

        Args:
            tag: default: `global_stepN`.
            client_state: JSON values of the caller's own, the same on all ranks; else rank 0's, with a warning.
            save_latest: `load_checkpoint` takes this one unless it is told a tag.
            exclude_frozen_parameters: leave out what is not trained.
            asynchronous: copy the state to the host's memory, and write while the training goes on; the next save, or
                `wait_for_checkpoint`, raises what went wrong.

        Raises CheckpointError, on all ranks: state that cannot be saved, ranks that disagree, a disk that is full.
        """
        engine: Any = self
        with Together(engine.mesh, "writing the checkpoint before"):
            self.wait_for_checkpoint()
        self._writing = save(
            engine,
            Path(save_dir),
            f"global_step{engine.global_steps}" if tag is None else str(tag),
            client_state,
            latest=save_latest,
            exclude_frozen=exclude_frozen_parameters,
            asynchronous=asynchronous,
        )
        return True

    def wait_for_checkpoint(self) -> None:
        """Return when an asynchronous checkpoint of this rank is written (on rank 0: of all ranks)."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.wait()

    def load_checkpoint(
        self,
        load_dir: str | os.PathLike[str],
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Go on from a checkpoint of any number of ranks and any ZeRO stage; called by all ranks.

        Returns its path and the client state, on all ranks rank 0's; (None, None), with a warning, where there is none
        and no tag was given. Another train_batch_size than the checkpoint's is warned of.
        Raises CheckpointError, on all ranks, for a checkpoint that is broken or of another model or optimizer.
        """
        engine: Any = self
        with Together(engine.mesh, "writing the checkpoint before"):
            self.wait_for_checkpoint()
        return load(
            engine,
            Path(load_dir),
            tag,
            strict=load_module_strict,
            optimizer=load_optimizer_states,
            scheduler=load_lr_scheduler_states,
            module_only=load_module_only,
        )
