"""Errors of one rank are errors of all: what ranks do together either succeeds everywhere or raises everywhere."""

from __future__ import annotations

from typing import Any
from zlib import crc32

import torch

from phalanx.distributed.mesh import Mesh
from phalanx.training.checkpoint_folder import CheckpointError


def place_among_all(mesh: Mesh) -> tuple[int, int]:
    """This rank among all, and how many there are."""
    return mesh.dp.rank * mesh.tp.size + mesh.tp.rank, mesh.dp.size * mesh.tp.size


def most(mesh: Mesh, *numbers: int) -> list[int]:
    """The largest of each number over all ranks."""
    found = torch.tensor(numbers, dtype=torch.int64, device=mesh.device)
    return [int(n) for n in mesh.dp.all_reduce(mesh.tp.all_reduce(found, "max"), "max").tolist()]


def differ(mesh: Mesh, text: str | None) -> bool:
    """Whether the ranks' texts are not all the same (but for one chance in 2^32); called by all ranks."""
    mark = -1 if text is None else crc32(text.encode())
    largest, smallest = most(mesh, mark, -mark)
    return largest != -smallest


class Together:
    """`with Together(mesh, "writing"):` an error within it, on any rank, is raised on all of them, and nobody goes on
    before all are through. A rank without an error of its own raises CheckpointError."""

    def __init__(self, mesh: Mesh, what: str) -> None:
        self._mesh = mesh
        self._what = what

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is not None and not isinstance(error, Exception):
            return
        if most(self._mesh, int(error is not None))[0] and error is None:
            raise CheckpointError(f"{self._what}: another rank has failed, see its error")
