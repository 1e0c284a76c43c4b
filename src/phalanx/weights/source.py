"""What every source of weights looks like to those who read from it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from difflib import get_close_matches
from typing import Any, NamedTuple

import torch

from phalanx.weights.names import WeightError as WeightError


class TensorInfo(NamedTuple):
    """What a tensor will look like when it is read."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class WeightSource(ABC):
    """Named tensors that are read one by one, whole or in part. Subclass it to load weights from anywhere.

    All methods but `verify` raise WeightError where they meet something that cannot be read.
    """

    @abstractmethod
    def names(self) -> Sequence[str]:
        """The names of all tensors, each once."""

    @abstractmethod
    def info(self, name: str) -> TensorInfo:
        """Shape and dtype of a tensor, without reading its values."""

    @abstractmethod
    def read(self, name: str, index: tuple[slice, ...] | None = None) -> torch.Tensor:
        """A tensor, or the box of it that `index` cuts out (a slice with step 1 for each of its first dimensions).

        A source on disk returns a contiguous CPU tensor of its own; one in memory may return a view.
        """

    def read_into(self, out: torch.Tensor, name: str, index: tuple[slice, ...] | None = None) -> None:
        """Writes what `read` gives into `out`, which has its shape and any dtype and device.

        A source that can do so without a tensor in between overrides this.
        """
        fill(out, self.read(name, index), name)

    def verify(self) -> list[str]:
        """All problems that can be found before any values are read: absent, truncated or corrupt files, ..."""
        return []

    def tensor(self, name: str) -> SourceTensor:
        """A tensor that is read when it is sliced."""
        return SourceTensor(self, name, self.info(name))


class SourceTensor:
    """A tensor that still lies in its source; slicing reads just that part.

    Torch functions take it, and it has the methods of a tensor: then all of it is read, each time.
    """

    def __init__(self, source: WeightSource, name: str, info: TensorInfo) -> None:
        self._source = source
        self.name = name
        self.shape = torch.Size(info.shape)
        self.dtype = info.dtype

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def __getitem__(self, index: slice | tuple[slice, ...]) -> torch.Tensor:
        return self._source.read(self.name, self._slices(index))

    def read_into(self, out: torch.Tensor, index: slice | tuple[slice, ...]) -> None:
        """Writes a part of it into `out`, which has the part's shape and any dtype and device."""
        self._source.read_into(out, self.name, self._slices(index))

    def load(self) -> torch.Tensor:
        """The whole tensor."""
        return self._source.read(self.name)

    def _slices(self, index: slice | tuple[slice, ...]) -> tuple[slice, ...]:
        slices = index if isinstance(index, tuple) else (index,)
        if len(slices) > self.ndim or not all(isinstance(part, slice) and part.step in (None, 1) for part in slices):
            raise TypeError(f"{self.name} of shape {tuple(self.shape)} is sliced by ranges of step 1, not by {index!r}")
        return slices

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or not hasattr(torch.Tensor, name):
            raise AttributeError(f"a SourceTensor has no attribute {name!r}")
        return getattr(self.load(), name)

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return function(*_loaded(args), **_loaded(kwargs or {}))

    def __repr__(self) -> str:
        return f"SourceTensor({self.name!r}, {tuple(self.shape)}, {self.dtype})"


def fill(out: torch.Tensor, part: torch.Tensor, name: str) -> None:
    """`out` becomes `part`. WeightError where the shapes differ: copying would repeat what is too small."""
    if out.shape != part.shape:
        raise WeightError(f"{name}: asked for a part of {tuple(out.shape)}, the source gave {tuple(part.shape)}")
    out.copy_(part)


def _loaded(value: Any) -> Any:
    """The same with every SourceTensor read."""
    if isinstance(value, SourceTensor):
        return value.load()
    if isinstance(value, (list, tuple)):
        return [_loaded(item) for item in value]
    if isinstance(value, dict):
        return {key: _loaded(item) for key, item in value.items()}
    return value


def unknown_tensor(name: str, known: Iterable[str], where: object) -> WeightError:
    """The error for a name that a source lacks, with the nearest ones that it has."""
    near = get_close_matches(name, list(known), n=3)
    hint = f"; the nearest names are {', '.join(near)}" if near else ""
    return WeightError(f"{where} has no tensor named {name!r}{hint}")
