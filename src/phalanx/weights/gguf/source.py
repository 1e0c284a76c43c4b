"""Weights in a GGUF file, under Hugging Face names and dequantised as they are read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from phalanx.weights.gguf.config import hf_config
from phalanx.weights.gguf.header import StoredTensor, read_header
from phalanx.weights.gguf.names import ARCHITECTURES, hf_name, permuted_heads, unpermute
from phalanx.weights.gguf.tokenizer import build_tokenizer
from phalanx.weights.gguf.types import TensorType, tensor_type
from phalanx.weights.source import TensorInfo, WeightError, WeightSource, unknown_tensor

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_ROPE_FACTORS = "rope_freqs.weight"  # part of the config, not of the weights
_CHUNK_ELEMENTS = 1 << 22  # bounds the temporaries of dequantising


class GGUFSource(WeightSource):
    """One GGUF file of a Llama-like model.

    Quantised tensors are read as float32, others in their own type. Only the rows of a slice are read. The rows of q
    and k, which llama.cpp stores permuted, come in the order of Hugging Face. Needs the extra `phalanx[gguf]`.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._header = read_header(self.path)
        self.metadata: dict[str, Any] = self._header.metadata
        self._architecture = str(self.metadata.get("general.architecture"))
        self._types: dict[int, TensorType] = {}
        self._stored: dict[str, str] = {}
        self._problems = list(self._header.problems) or self._understand()

    def names(self) -> Sequence[str]:
        return list(self._usable())

    def info(self, name: str) -> TensorInfo:
        stored = self._header.tensors[self._find(name)]
        return TensorInfo(stored.shape, self._types[stored.type].dtype)

    def read(self, name: str, index: tuple[slice, ...] | None = None) -> torch.Tensor:
        stored_name = self._find(name)
        stored = self._header.tensors[stored_name]
        heads = permuted_heads(stored_name, self._architecture, self.metadata)
        start, stop, _ = (index[0] if index else slice(None)).indices(stored.shape[0])
        stop = max(start, stop)
        others = index[1:] if index else ()
        if not heads:
            return self._rows(stored, start, stop, others)
        head_dim = stored.shape[0] // heads
        first, last = start // head_dim * head_dim, -(-stop // head_dim) * head_dim  # whole heads around the slice
        rows = unpermute(self._rows(stored, first, last, others), head_dim)
        return rows[start - first : stop - first].clone()

    def verify(self) -> list[str]:
        return list(self._problems)

    def hf_config(self) -> dict[str, Any]:
        """What the config.json of this model would hold. Raises WeightError for what a config cannot express."""
        shapes = {name: self._header.tensors[stored].shape for name, stored in self._usable().items()}
        factors = self._header.tensors.get(_ROPE_FACTORS)
        sizes = Counter[torch.dtype]()
        for name in self._stored:
            info = self.info(name)
            sizes[info.dtype] += prod(info.shape)
        return hf_config(
            self.metadata,
            shapes,
            None if factors is None else self._rows(factors, 0, factors.shape[0], ()),
            sizes.most_common(1)[0][0],
        )

    def tokenizer(self) -> PreTrainedTokenizerFast:
        """The tokenizer in the file, with its chat template. Raises WeightError for a kind that is not known here."""
        return build_tokenizer(self.metadata)

    def _understand(self) -> list[str]:
        """Fill the tables of types and names; the problems met."""
        if self._architecture not in ARCHITECTURES:
            known = ", ".join(ARCHITECTURES)
            return [f"{self.path} has the architecture {self._architecture!r}; GGUF is read for: {known}"]
        problems = []
        if (parts := self.metadata.get("split.count", 1)) not in (0, 1):
            problems.append(f"{self.path} is one part of {parts}: merge them with gguf-split")
        for name, stored in self._header.tensors.items():
            hf = hf_name(name)
            if hf is not None:
                self._stored[hf] = name
            elif name != _ROPE_FACTORS:
                problems.append(f"{self.path} holds {name}, which models of this architecture do not have")
            try:
                self._check(name, stored)
            except WeightError as error:
                problems += [f"{self.path}: {name}: {problem}" for problem in error.problems]
        if not self._stored:
            problems.append(f"{self.path} holds no weights")
        return problems

    def _check(self, name: str, stored: StoredTensor) -> None:
        if stored.type not in self._types:
            self._types[stored.type] = tensor_type(stored.type)
        if not stored.shape or not stored.elements:
            raise WeightError(f"the shape {stored.shape} has no elements")
        end = stored.offset + self._types[stored.type].bytes(stored.shape)
        if end > self._header.file_bytes:
            raise WeightError(f"it is truncated: it ends at byte {end}, the file at byte {self._header.file_bytes}")
        heads = permuted_heads(name, self._architecture, self.metadata)
        if heads and stored.shape[0] % (2 * heads):
            raise WeightError(f"its {stored.shape[0]} rows are no whole number of {heads} heads of rotary pairs")

    def _usable(self) -> dict[str, str]:
        if self._problems:
            raise WeightError(*self._problems)
        return self._stored

    def _find(self, name: str) -> str:
        if name not in self._usable():
            raise unknown_tensor(name, self._stored, self.path)
        return self._stored[name]

    def _rows(self, stored: StoredTensor, start: int, stop: int, others: tuple[slice, ...]) -> torch.Tensor:
        """Entries start..stop of the first dimension, cut by `others` in the further ones."""
        kind = self._types[stored.type]
        if len(stored.shape) == 1:
            return self._decode(kind, stored.offset, stored.shape)[start:stop].clone()
        row = stored.shape[1:]
        row_bytes = kind.bytes(row)
        step = max(_CHUNK_ELEMENTS // prod(row), 1)
        parts = [torch.empty(0, *row, dtype=kind.dtype)[(slice(None), *others)]]
        for first in range(start, stop, step):
            shape = (min(step, stop - first), *row)
            chunk = self._decode(kind, stored.offset + first * row_bytes, shape)
            parts.append(chunk[(slice(None), *others)])
        return torch.cat(parts)

    def _decode(self, kind: TensorType, offset: int, shape: tuple[int, ...]) -> torch.Tensor:
        data = bytearray(kind.bytes(shape))
        with self.path.open("rb") as file:
            file.seek(offset)
            if file.readinto(data) < len(data):
                raise WeightError(f"{self.path} has become shorter since it was opened")
        return kind.decode(data).reshape(shape)
