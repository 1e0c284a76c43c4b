"""Compiling the native CPU kernels on first use, with the system's C++ compiler, for the machine at hand.

The library is cached by what it depends on: sources, compiler, flags, processor. It is written aside and renamed, so
that ranks which compile at the same time do not meet.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

from phalanx.weights.embedded import default_cache

COMPILERS = ("c++", "g++", "clang++")
SOURCES = Path(__file__).parent / "native"
FLAGS = ("-std=c++17", "-O3", "-fno-math-errno", "-fno-trapping-math", "-fopenmp", "-shared", "-fPIC", "-w")


class CompileError(RuntimeError):
    """The kernels cannot be compiled here; says why."""


def find_compiler() -> str:
    """The path of the first C++ compiler there is. CompileError if there is none."""
    for name in COMPILERS:
        path = shutil.which(name)
        if path is not None:
            return path
    raise CompileError(f"no C++ compiler ({', '.join(COMPILERS)}) is installed")


def compiled_library(cache: Path | None = None) -> Path:
    """The compiled kernels, from `cache` (a folder; the user's cache by default), compiled where they are not in it.

    Raises:
        CompileError: no compiler, it fails, or no folder can be written.
    """
    compiler = find_compiler()
    native = "-mcpu=native" if platform.machine() in ("aarch64", "arm64") else "-march=native"
    command = [compiler, *FLAGS, native]
    path = _folder(cache) / f"{_key(command)}.so"
    if not _is_whole(path):
        _compile(command, path)
    return path


def _is_whole(path: Path) -> bool:
    """Whether the library is there as it was compiled: loading half of one would end the process."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest() == _checksum(path).read_text()
    except OSError:
        return False


def _checksum(library: Path) -> Path:
    return library.with_suffix(".sha256")


def _key(command: list[str]) -> str:
    """A name for all that the library depends on."""
    version = _run([command[0], "--version"])
    content = hashlib.sha256("\0".join([*command, version, processor()]).encode())
    for source in sorted(SOURCES.iterdir()):
        content.update(source.name.encode() + b"\0" + source.read_bytes())
    return content.hexdigest()[:32]


def processor() -> str:
    """What -march=native looks at: the model and features of the first core."""
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:
        return platform.processor()
    wanted = ("model", "model name", "flags", "Features", "CPU implementer", "CPU part")
    return "\n".join(line for line in lines if line.split(":")[0].strip() in wanted)


def _folder(cache: Path | None) -> Path:
    folder = default_cache() / "native" if cache is None else cache
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
    except OSError:
        pass
    # A folder of this user alone: what lies in it is executed.
    return Path(tempfile.mkdtemp(prefix="phalanx-native-"))


def _compile(command: list[str], path: Path) -> None:
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        aside = Path(folder) / path.name
        _run([*command, *map(str, sorted(SOURCES.glob("*.cpp"))), "-o", str(aside)])
        note = _checksum(aside)
        note.write_text(hashlib.sha256(aside.read_bytes()).hexdigest())
        os.replace(aside, path)
        os.replace(note, _checksum(path))


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CompileError(f"{command[0]} did not run: {error}") from error
    if done.returncode:
        raise CompileError(f"{command[0]} failed: {done.stderr.strip()[-2000:]}")
    return done.stdout
