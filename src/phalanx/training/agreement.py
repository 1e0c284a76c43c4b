"""The ranks of a tensor-parallel group compute one model together: they must be given the same batch and the same seed.

What the host knows (structure, shapes, numbers, the state of the random generator) is compared before each forward,
since tensors of different shapes would hang or corrupt the first collective. What lies in the tensors is reduced to a
fingerprint and compared on the device; the host looks at the answer before the update, when it has long been there, so
that nobody waits for the backward pass.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from phalanx.distributed.group import Group, SoloGroup
from phalanx.distributed.mesh import Mesh, TorchGroup

# Any odd numbers would do: multiplied by one of them, integers modulo 2^64 stay distinct.
_ODD = 0x1E3779B97F4A7C15
_SCALARS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


class _Comparison(NamedTuple):
    """Of forwards whose inputs have the same `names`: whether ranks and inputs ever differed from the first rank's,
    bool [ranks, inputs], as `found` on the device, and in host memory once `arrived`."""

    names: tuple[str, ...]
    found: Tensor
    differs: Tensor
    arrived: torch.cuda.Event | None


class Agreement:
    """Compares what the ranks of `mesh.tp` are given, and which forward it is. With one rank it does nothing.

    Made by all ranks of the mesh alike: on GPUs it makes a gloo group of each TP group, so that the comparison before a
    forward does not wait for the device.
    """

    def __init__(self, module: nn.Module, mesh: Mesh) -> None:
        self._module = module
        self._mesh = mesh
        self._host = _host_group(mesh)
        self._open: dict[tuple[str, ...], _Comparison] = {}
        self._dropout = False
        self._forwards = 0
        self.refresh()

    def refresh(self) -> None:
        """Look again whether the model draws random numbers in training: after a dropout rate has changed."""
        self._dropout = any(_drops(module) for module in self._module.modules())

    def before_forward(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Tensor]:
        """The tensors that are given, for `after_forward`: a model may take them out of the dicts that hold them.

        Raises RuntimeError, on every rank of the group, where structure, shapes or random state differ.
        """
        if self._mesh.tp.size == 1:
            return {}
        found = list(_walk(args, kwargs))
        self._forwards += 1
        mode = "training" if self._module.training else "evaluation"
        gradients = "with" if torch.is_grad_enabled() else "without"
        lines = [f"forward {self._forwards}, in {mode} mode, {gradients} gradients"]
        lines += [f"{path}: {text}" for path, text, _ in found]
        random = self._random_state() if self._dropout and self._module.training else b""
        mine = torch.tensor([[_hash("\n".join(lines).encode()), _hash(random)]])
        theirs = self._host.all_gather(mine)
        if (theirs[:, 0] != theirs[0, 0]).any():
            raise RuntimeError(self._different_lines(lines))
        if (theirs[:, 1] != theirs[0, 1]).any():
            raise RuntimeError(
                "the states of torch's random generators differ inside a tensor-parallel group, on ranks "
                f"{self._unlike_first(theirs[:, 1])} against rank {self._ranks()[0]}, and the model draws for dropout: "
                "give all ranks of a TP group one seed, or turn dropout off"
            )
        return {path: tensor for path, _, tensor in found if tensor is not None}

    def after_forward(self, given: Mapping[str, Tensor]) -> None:
        """Starts to compare what lies in the tensors: behind the forward, so that the device does not wait for it.

        Raises RuntimeError, on every rank of the group, where it differs and no update will look at it.
        """
        if not given:
            return
        names, marks = tuple(given), [_fingerprint(t, self._mesh.device) for t in given.values()]
        if self._module.training and torch.is_grad_enabled():
            self._open[names] = self._compare(names, marks, self._open.get(names))
        else:
            # No update will look at these.
            self._check(self._compare(names, marks))

    def before_update(self) -> None:
        """Raises RuntimeError, on every rank of the group, if any tensor of any forward since the last call differs."""
        opened, self._open = self._open, {}
        for comparison in opened.values():
            self._check(comparison)

    def _compare(self, names: tuple[str, ...], marks: list[Tensor], before: _Comparison | None = None) -> _Comparison:
        theirs = self._mesh.tp.all_gather(torch.stack(marks)[None])
        found = theirs != theirs[0]
        if before is not None:
            found |= before.found
        differs, arrived = found.to("cpu", non_blocking=True), None
        if found.is_cuda:
            arrived = torch.cuda.Event()
            arrived.record()
        return _Comparison(names, found, differs, arrived)

    def _check(self, comparison: _Comparison) -> None:
        if comparison.arrived is not None:
            comparison.arrived.synchronize()
        differs = comparison.differs
        if not differs.any():
            return
        names = [path for path, bad in zip(comparison.names, differs.any(0).tolist(), strict=True) if bad]
        ranks = self._unlike_first(differs.any(1))
        raise RuntimeError(
            f"inputs differ inside a tensor-parallel group: {', '.join(names)} on ranks {ranks} is not what rank "
            f"{self._ranks()[0]} got. All ranks of a TP group compute one model together and need the same batches: "
            "shard the data by the data-parallel rank, and shuffle with the same seed"
        )

    def close(self) -> None:
        """Let the group go that was made here."""
        if self._host is not self._mesh.tp:
            self._host.close()

    def _random_state(self) -> bytes:
        device = self._mesh.device
        states = [torch.get_rng_state()]
        if device.type == "cuda":
            states.append(torch.cuda.get_rng_state(device))
        return b"".join(state.numpy().tobytes() for state in states)

    def _different_lines(self, lines: list[str]) -> str:
        texts = _gather_text(self._host, "\n".join(lines))
        first = texts[0].splitlines()
        told = []
        for rank, text in zip(self._ranks(), texts, strict=True):
            other = text.splitlines()
            told += [f"rank {rank} has {line!r}" for line in other if line not in first]
            told += [f"rank {rank} has not {line!r}" for line in first if line not in other]
        return (
            f"inputs differ inside a tensor-parallel group (rank {self._ranks()[0]} is compared with): "
            f"{'; '.join(told) or 'their order'}. All ranks of a TP group need the same batches"
        )

    def _unlike_first(self, marks: Tensor) -> list[int]:
        bad = marks if marks.dtype == torch.bool else marks != marks[0]
        return [rank for rank, differs in zip(self._ranks(), bad.tolist(), strict=True) if differs]

    def _ranks(self) -> list[int]:
        """The global ranks of the group; its own numbers where it is no group of torch.distributed."""
        group = self._mesh.tp_process_group
        return list(range(self._mesh.tp.size)) if group is None else dist.get_process_group_ranks(group)


def check_not_empty(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Raises ValueError for an input tensor without elements: its loss would be NaN."""
    for path, text, tensor in _walk(args, kwargs):
        if tensor is not None and not tensor.numel():
            raise ValueError(f"the batch is empty: {path} is {text}. Leave such a batch out on all ranks")


def _walk(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[tuple[str, str, Tensor | None]]:
    for index, value in enumerate(args):
        yield from _leaves(f"argument {index}", value)
    for name in sorted(kwargs):
        yield from _leaves(name, kwargs[name])


def _leaves(path: str, value: Any) -> Iterator[tuple[str, str, Tensor | None]]:
    """(where it is, what the host knows of it, the tensor) of everything inside `value`."""
    if isinstance(value, Tensor):
        yield path, f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}", value
    elif isinstance(value, Mapping):
        for key in value:
            yield from _leaves(f"{path}[{key!r}]", value[key])
    elif isinstance(value, list | tuple):
        yield path, f"{type(value).__name__} of {len(value)}", None
        for index, item in enumerate(value):
            yield from _leaves(f"{path}[{index}]", item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from _leaves(f"{path}.{field.name}", getattr(value, field.name))
    elif isinstance(value, _SCALARS):
        yield path, repr(value), None
    else:
        yield path, type(value).__name__, None


def _fingerprint(t: Tensor, device: torch.device) -> Tensor:
    """A number on `device` that two tensors of one shape share only if they are equal, but for one chance in 2^60.

    The bits as integers, each times an odd number of its own, summed modulo 2^64.
    """
    t = t.detach().to(device)
    if t.is_complex():
        t = torch.view_as_real(t)
    if t.is_floating_point():
        t = t.contiguous().view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[t.element_size()])
    words = t.flatten().to(torch.int64)
    odd = torch.arange(words.numel(), device=device, dtype=torch.int64) * _ODD + 0x3F58476D1CE4E5B9
    mixed = words * ((odd ^ (odd >> 29)) | 1)
    return mixed.sum()


def _drops(module: nn.Module) -> bool:
    """Whether it draws random numbers when it trains: a rate above 0 under a name like dropout or layerdrop."""
    if isinstance(module, nn.modules.dropout._DropoutNd):
        return module.p > 0
    return any("drop" in name and isinstance(rate, float) and rate > 0 for name, rate in vars(module).items())


def _hash(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little", signed=True)


def _gather_text(group: Group, text: str) -> list[str]:
    mine = torch.tensor(list(text.encode()), dtype=torch.uint8)
    sizes = group.all_gather(torch.tensor([mine.numel()])).tolist()
    data = bytes(group.all_gather(mine, 0, sizes).tolist())
    ends = [sum(sizes[: index + 1]) for index in range(len(sizes))]
    return [data[end - size : end].decode() for end, size in zip(ends, sizes, strict=True)]


def _host_group(mesh: Mesh) -> Group:
    """The TP ranks, over host memory."""
    if mesh.tp.size == 1:
        return SoloGroup()
    if mesh.device.type == "cpu":
        return mesh.tp
    # TP ranks are consecutive (Mesh.build); all ranks of the world make all groups, in one order.
    size, rank = mesh.tp.size, dist.get_rank()
    made = [
        dist.new_group(list(range(start, start + size)), backend="gloo")
        for start in range(0, dist.get_world_size(), size)
    ]
    return TorchGroup(made[rank // size])
