"""Checkpoints of the Hugging Face hub."""

from __future__ import annotations

import re
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled

from phalanx.weights.folder import missing_files
from phalanx.weights.source import WeightError

_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
_DESCRIPTION = ["*.json", "*.model", "*.txt", "*.jinja"]
_IGNORED = ["consolidated*", "original/*"]


def is_hub_id(name: str) -> bool:
    """Whether a string has the form `owner/name` or `name`."""
    return _HUB_ID.fullmatch(name) is not None


def snapshot(repo_id: str, revision: str | None = None) -> Path:
    """The folder of a hub repository with its weights: from the local cache where that is complete, else downloaded.

    Raises WeightError when it is neither in the cache nor to be had.
    """
    try:
        cached = Path(snapshot_download(repo_id, revision=revision, local_files_only=True))
        if not missing_files(cached):
            return cached
    except (LocalEntryNotFoundError, HFValidationError):
        pass  # not in the cache: ask the hub
    try:
        for weights in ("*.safetensors", "*.bin", "*.gguf"):
            folder = Path(
                snapshot_download(
                    repo_id, revision=revision, allow_patterns=[*_DESCRIPTION, weights], ignore_patterns=_IGNORED
                )
            )
            missing = missing_files(folder)
            if not missing:
                return folder
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled, OSError) as error:
        raise WeightError(
            f"{repo_id!r} (revision {revision or 'main'}) is neither a local path, nor complete in the cache of the "
            f"Hugging Face hub, nor could it be fetched: {error}"
        ) from error
    raise WeightError(*missing)
