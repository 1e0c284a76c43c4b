"""Transposed: a tensor (or lazy file tensor) of two dimensions with rows and columns swapped, still lazy."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from phalanx.layout import copy_part


class Transposed:
    """``source.T``; reading a slice reads only what it covers.

    Args:
        source: anything of two dimensions with ``shape``, ``dtype`` and ``[slices]``.
    """

    def __init__(self, source: Any) -> None:
        self._source = source
        self.dtype: torch.dtype = source.dtype
        rows, columns = source.shape
        self.shape = torch.Size((columns, rows))

    def __getitem__(self, index: tuple[slice, ...]) -> Tensor:
        part: Tensor = self._source[self._swapped(index)]
        return part.T

    def read_into(self, out: Tensor, index: tuple[slice, ...]) -> None:
        """Writes a slice into ``out``, which has its shape and any dtype and device."""
        copy_part(out.T, self._source, self._swapped(index))

    def _swapped(self, index: tuple[slice, ...]) -> tuple[slice, slice]:
        rows, columns = (*index, slice(None))[:2]
        return slice(*columns.indices(self.shape[1])), slice(*rows.indices(self.shape[0]))
