"""Whether a run that goes on sees the data that it would have seen: what checkpoints say of it."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx.config import ConfigError

if TYPE_CHECKING:
    from phalanx.training.engine import TrainingEngine
    from phalanx.training.recipe import Recipe
    from phalanx.training.text_data import Samples

_log = logging.getLogger(__name__)


def warn_of_other_batches(engine: TrainingEngine, path: Path, index: Mapping[str, Any]) -> None:
    """One line where an engine has another batch size than the checkpoint `path`, whose index is given, was saved with.

    It is no error: the loop decides what it does with the step that it goes on from.
    """
    saved, now = index.get("train_batch_size"), engine.train_batch_size()
    if saved not in (None, now):
        _log.warning(
            "%s was saved with a train_batch_size of %d, and this run has %d: after %d steps they have seen different "
            "amounts of data, so a loop that counts steps to find its place in the data repeats or leaves out samples",
            path,
            saved,
            now,
            index["global_steps"],
        )


def mark_of_data(recipe: Recipe, samples: Samples) -> dict[str, Any]:
    """What decides which samples a step of `phalanx train` sees, as JSON values: settings by their names in the recipe,
    and a digest of all token ids and labels, wherever their files lie."""
    digest = hashlib.blake2b(digest_size=16)
    for array in (samples.ids, samples.labels, samples.mask):
        digest.update(array.data)
    return {
        "data.sequence_length": recipe.data.sequence_length,
        "data.packing": recipe.data.packing,
        "optimization.batch_size": recipe.optimization.batch_size,
        "optimization.seed": recipe.optimization.seed,
        "samples": len(samples),
        "digest": digest.hexdigest(),
    }


def check_data(saved: Mapping[str, Any] | None, recipe: Recipe, samples: Samples) -> None:
    """Raises ConfigError where a checkpoint that is resumed, whose client state is given, is of a run over other data.

    A run that goes on at step N with other samples, or others to a step, would repeat some and never see others.
    """
    before = (saved or {}).get("data")
    if not isinstance(before, Mapping):
        return
    now = mark_of_data(recipe, samples)
    changed = [
        f"{name} was {before[name]} and is {value}"
        for name, value in now.items()
        if "." in name and name in before and before[name] != value
    ]
    if not changed and before.get("digest") != now["digest"]:
        changed = [
            f"data.train gave {before.get('samples')} samples and gives {now['samples']}, of another text or by "
            "another tokenizer"
        ]
    if changed:
        raise ConfigError(
            f"this is not the data that the checkpoint's run has seen so far: {'; '.join(changed)}. Set it back to go "
            "on; or begin a new run, with another output.folder, from the model of this one (phalanx ckpt export)"
        )
