"""Buckets: the parameters of a model in a few flat tensors, so that one collective serves many of them.

The parameters keep their identity; `parameter.data` becomes a view into the bucket:

    params     [ p0 | p1 | p2 ... | pad ]     the model computes with these
    gradient   [ g0 | g1 | g2 ... | pad ]     of this rank, summed over backward passes
    shard                [ part of this DP rank ]      master values and reduced gradient (all of it where not sharded)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from phalanx.distributed.group import Group
from phalanx.distributed.mesh import Mesh

# Slots and shards begin on multiples of this many elements, so that vectorised kernels find them aligned.
ALIGN = 64
# torch 2.13 renames both, and warns at the old names.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass(frozen=True)
class Slot:
    """Where one parameter lies in its bucket: elements `start` to `stop`, seen as `shape`."""

    name: str
    shape: tuple[int, ...]
    start: int

    @property
    def stop(self) -> int:
        return self.start + prod(self.shape)

    def view(self, flat: Tensor) -> Tensor:
        return flat[self.start : self.stop].view(self.shape)


def plan(parameters: dict[str, nn.Parameter], partial: set[str], limit: int) -> list[list[Slot]]:
    """The slots of each bucket, buckets in the order in which a backward pass fills them (the last parameter first).

    A bucket has one dtype, holds only partial or only whole gradients, and at most `limit` elements, unless a single
    parameter has more. Parameters without elements get no slot.
    """
    filled: list[list[Slot]] = []
    open_buckets: dict[tuple[torch.dtype, bool], list[Slot]] = {}
    for name, parameter in reversed(parameters.items()):
        if not parameter.numel():
            continue
        key = (parameter.dtype, name in partial)
        slots = open_buckets.setdefault(key, [])
        start = _aligned(slots[-1].stop) if slots else 0
        if slots and start + parameter.numel() > limit:
            filled.append(open_buckets.pop(key))
            slots, start = open_buckets.setdefault(key, []), 0
        slots.append(Slot(name, tuple(parameter.shape), start))
    position = {name: index for index, name in enumerate(reversed(parameters))}
    return sorted([*filled, *open_buckets.values()], key=lambda slots: position[slots[-1].name])


class Bucket:
    """One flat tensor of parameters, their gradient, and this DP rank's shard of both.

    `master_dtype`: of the shard and of the reduced gradient. `param_dtype`: what the model computes with.
    `gradient_dtype`: in which the passes of this rank are summed and travel.
    """

    def __init__(
        self,
        slots: Sequence[Slot],
        parameters: dict[str, nn.Parameter],
        mesh: Mesh,
        *,
        sharded: bool,
        partial: bool,
        master_dtype: torch.dtype,
        param_dtype: torch.dtype,
        gradient_dtype: torch.dtype,
    ) -> None:
        self.slots = tuple(slots)
        self.sharded = sharded
        self._dp_group = mesh.dp_process_group
        self._partial_over: Group | None = mesh.tp if partial and mesh.tp.size > 1 else None
        self._gradient_dtype = gradient_dtype
        numel = _aligned(slots[-1].stop, ALIGN * mesh.dp.size)
        part = numel // mesh.dp.size if sharded else numel
        self.start = part * mesh.dp.rank if sharded else 0
        self.stop = self.start + part
        full = torch.zeros(numel, dtype=master_dtype, device=mesh.device)
        for slot in self.slots:
            slot.view(full).copy_(parameters[slot.name].data)
        mesh.dp.broadcast(full, 0)
        self.params = full.to(param_dtype)
        mine = full[self.start : self.stop]
        self.master = mine if self.params is full else mine.clone()
        for slot in self.slots:
            parameters[slot.name].data = slot.view(self.params)
        # The gradient of the step so far, of all passes that were summed.
        self.reduced: Tensor | None = None
        self._local: Tensor | None = None
        self._filled: set[int] = set()
        self._received: Tensor | None = None
        self._work: Any = None

    def add(self, index: int, gradient: Tensor) -> None:
        """The gradient of slot `index` is added to those of earlier passes."""
        if self._local is None:
            self._local = torch.empty_like(self.params, dtype=self._gradient_dtype)
        view = self.slots[index].view(self._local)
        if index in self._filled:
            view.add_(gradient)
        else:
            view.copy_(gradient)
            self._filled.add(index)

    def launch(self) -> None:
        """Start to sum the gradient over the DP ranks. What no pass has filled counts as zeros.

        What lies between slots is of no meaning, here and in `reduced`: no fragment covers it.
        """
        if self._local is None:
            self._local = torch.zeros_like(self.params, dtype=self._gradient_dtype)
        else:
            for index, slot in enumerate(self.slots):
                if index not in self._filled:
                    slot.view(self._local).zero_()
        local, self._local, self._filled = self._local, None, set()
        self._received = local
        if self._dp_group is None:
            return
        if self.sharded:
            self._received = local.new_empty(self.stop - self.start)
            self._work = _reduce_scatter(self._received, local, group=self._dp_group, async_op=True)
        else:
            self._work = dist.all_reduce(local, group=self._dp_group, async_op=True)

    def collect(self) -> None:
        """Wait for what was launched, and add it to `reduced`."""
        if self._received is None:
            return
        if self._work is not None:
            self._work.wait()
        received = self._received.to(self.master.dtype)
        self.reduced = received if self.reduced is None else self.reduced.add_(received)
        self._received = self._work = None

    def gradient(self, start: int, stop: int) -> Tensor | None:
        """What was collected of the elements `start` to `stop` of the shard; None if nothing was."""
        return None if self.reduced is None else self.reduced[start:stop]

    def sum_partial(self) -> None:
        """Where each TP rank has computed a part of the gradient: the sum of the parts."""
        if self._partial_over is not None and self.reduced is not None:
            self.reduced = self._partial_over.all_reduce(self.reduced)

    def publish(self) -> Any:
        """Master values into `params`; returns the work that brings those of the other DP ranks, or None."""
        mine = self.params[self.start : self.stop]
        if mine.data_ptr() != self.master.data_ptr():
            mine.copy_(self.master)
        if not self.sharded or self._dp_group is None:
            return None
        # gloo reads while it writes: it must not find its input inside its output.
        source = mine.clone() if mine.device.type == "cpu" else mine
        return _all_gather(self.params, source, group=self._dp_group, async_op=True)

    def discard(self) -> None:
        """Forget all gradients."""
        if self._work is not None:
            self._work.wait()
        self.reduced = self._local = self._received = self._work = None
        self._filled.clear()


class LooseBucket(Bucket):
    """A bucket whose gradient no other rank adds to: that of each parameter stays where autograd has made it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._index_at = {slot.start: index for index, slot in enumerate(self.slots)}
        self._passes: dict[int, Tensor] = {}
        self._sums: dict[int, Tensor] = {}
        self._launched = self._collected = False

    def add(self, index: int, gradient: Tensor) -> None:
        if index in self._passes:
            self._passes[index].add_(gradient)
        else:
            self._passes[index] = gradient.to(self._gradient_dtype)

    def launch(self) -> None:
        self._launched = True

    def collect(self) -> None:
        if not self._launched:
            return
        for index, gradient in self._passes.items():
            if index in self._sums:
                self._sums[index].add_(gradient)
            else:
                self._sums[index] = gradient.to(self.master.dtype)
        self._passes = {}
        self._launched, self._collected = False, True

    def gradient(self, start: int, stop: int) -> Tensor | None:
        if not self._collected:
            return None
        found = self._sums.get(self._index_at[start])
        return self.master.new_zeros(stop - start) if found is None else found.reshape(-1)

    def discard(self) -> None:
        super().discard()
        self._passes, self._sums = {}, {}
        self._launched = self._collected = False


def _aligned(numel: int, align: int = ALIGN) -> int:
    return -(-numel // align) * align
