"""The random generators of a rank, into a checkpoint and out of it."""

from __future__ import annotations

import logging
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import torch

from phalanx.distributed.mesh import Mesh
from phalanx.training.checkpoint_folder import RankWriter, Saved
from phalanx.training.together import place_among_all

_log = logging.getLogger(__name__)


def random_state(writer: RankWriter, mesh: Mesh) -> dict[str, Any]:
    """The states of the generators of this rank; those of torch go to its files."""
    numpy_kind, numpy_keys, *numpy_rest = np.random.get_state()
    tensors = {"torch": torch.get_rng_state(), "numpy": torch.from_numpy(np.asarray(numpy_keys, np.int64))}
    if mesh.device.type == "cuda":
        tensors["cuda"] = torch.cuda.get_rng_state(mesh.device)
    for name, tensor in tensors.items():
        writer.add(f"random/{writer.rank}/{name}", tuple(tensor.shape), (slice(0, tensor.numel()),), tensor)
    version, internal, gauss = random.getstate()
    return {"python": [version, list(internal), gauss], "numpy": [numpy_kind, *numpy_rest]}


def go_on_drawing(mesh: Mesh, path: Path, index: Mapping[str, Any]) -> None:
    """The same grid of ranks goes on with the numbers that it would have drawn; another one is seeded anew, from the
    step and the data-parallel rank, alike on the ranks of a tensor-parallel group."""
    if (index["tp"], index["dp"]) != (mesh.tp.size, mesh.dp.size):
        seed = crc32(f"{index['global_steps']}/{mesh.dp.rank}".encode())
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        _log.info(
            "the checkpoint is of tensor parallelism %d x data parallelism %d, this run of %d x %d: the random "
            "generators are seeded anew",
            index["tp"],
            index["dp"],
            mesh.tp.size,
            mesh.dp.size,
        )
        return
    rank, _ = place_among_all(mesh)
    told = index["ranks"][rank]["random"]
    with Saved(path) as saved:
        states = {
            name: saved.read(f"random/{rank}/{name}")
            for name in ("torch", "numpy", "cuda")
            if f"random/{rank}/{name}" in saved.entries
        }
    torch.set_rng_state(states["torch"])
    if "cuda" in states and mesh.device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"], mesh.device)
    version, internal, gauss = told["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, *rest = told["numpy"]
    np.random.set_state((kind, states["numpy"].numpy().astype(np.uint32), *rest))
