"""Rows: some rows of a tensor (or lazy file tensor), as a tensor that is still lazy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from phalanx.layout import copy_part


class Rows:
    """The rows of ``source`` in ``runs``, one after the other; reading a slice reads only the rows it covers.

    Args:
        source: anything with ``shape``, ``dtype`` and ``[slices]``.
        runs: (first row, number of rows) each.
    """

    def __init__(self, source: Any, runs: Sequence[tuple[int, int]]) -> None:
        self._source = source
        self._runs = list(runs)
        self.dtype: torch.dtype = source.dtype
        self.shape = (sum(length for _, length in self._runs), *source.shape[1:])

    def __getitem__(self, index: tuple[slice, ...]) -> Tensor:
        sizes = [len(range(*part.indices(size))) for part, size in zip(index, self.shape, strict=False)]
        out = torch.empty(*sizes, *self.shape[len(index) :], dtype=self.dtype)
        self.read_into(out, index)
        return out

    def read_into(self, out: Tensor, index: tuple[slice, ...]) -> None:
        """Writes a slice into ``out``, which has its shape and any dtype and device."""
        start, stop, _ = index[0].indices(self.shape[0])
        offset = 0
        for first, length in self._runs:
            low, high = max(start - offset, 0), min(stop - offset, length)
            if low < high:
                place = out[offset + low - start : offset + high - start]
                copy_part(place, self._source, (slice(first + low, first + high), *index[1:]))
            offset += length
