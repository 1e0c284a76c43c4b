"""Rows: some rows of a tensor (or lazy file tensor), as a tensor that is still lazy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


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
        start, stop, _ = index[0].indices(self.shape[0])
        parts, offset = [], 0
        for first, length in self._runs:
            low, high = max(start - offset, 0), min(stop - offset, length)
            if low < high:
                parts.append(self._source[(slice(first + low, first + high), *index[1:])])
            offset += length
        if not parts:
            return self._source[(slice(0, 0), *index[1:])]
        return parts[0] if len(parts) == 1 else torch.cat(parts)
