"""Checkpoints of the Hugging Face hub."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled

from phalanx.weights.names import WeightError

_DESCRIPTION = ["*.json", "*.model", "*.txt", "*.jinja"]
_IGNORED = ["consolidated*", "original/*"]


def snapshot(repo_id: str, revision: str | None = None, progress: Callable[[str], None] = lambda line: None) -> Path:
    """The folder of a hub repository with its weights: from the local cache where that is complete, else downloaded.

    `progress` gets a line of text as a download begins and ends.
    Raises WeightError when it is neither in the cache nor to be had.
    """
    try:
        cached = Path(snapshot_download(repo_id, revision=revision, local_files_only=True))
        if not _missing(cached):
            return cached
    except (LocalEntryNotFoundError, HFValidationError):
        pass  # not in the cache: ask the hub
    progress(f"downloading {repo_id} from the Hugging Face hub")
    try:
        for weights in ("*.safetensors", "*.bin", "*.gguf"):
            folder = Path(
                snapshot_download(
                    repo_id, revision=revision, allow_patterns=[*_DESCRIPTION, weights], ignore_patterns=_IGNORED
                )
            )
            missing = _missing(folder)
            if not missing:
                progress(f"downloaded to {folder}")
                return folder
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled, OSError) as error:
        raise WeightError(
            f"{repo_id!r}: there is no folder of that name here, and as an id of the Hugging Face hub (revision "
            f"{revision or 'main'}) it is neither complete in the cache nor could it be fetched: {error}"
        ) from error
    raise WeightError(*missing)


def _missing(folder: Path) -> list[str]:
    # With it comes PyTorch, and a name that nobody has needs none.
    from phalanx.weights.folder import missing_files

    return missing_files(folder)
