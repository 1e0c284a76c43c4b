"""The ggml types of tensors: their sizes, and how their bytes become numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, NamedTuple

import torch

from phalanx.weights.source import WeightError

_PLAIN = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
}


class TensorType(NamedTuple):
    """A way to store numbers: blocks of `block` numbers in `block_bytes` bytes, along the last dimension."""

    name: str
    block: int
    block_bytes: int
    dtype: torch.dtype
    decode: Callable[[bytearray], torch.Tensor]

    def bytes(self, shape: Sequence[int]) -> int:
        """The size of a tensor. Raises WeightError for rows that are no whole number of blocks."""
        if shape and shape[-1] % self.block:
            raise WeightError(f"rows of {shape[-1]} numbers are no whole number of {self.name} blocks of {self.block}")
        return prod(shape) // self.block * self.block_bytes


def tensor_type(number: int) -> TensorType:
    """The type that a file names by `number`. Raises WeightError if it is unknown or cannot be dequantised."""
    try:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
    except ImportError as error:
        raise WeightError("reading GGUF files needs the gguf package: pip install 'phalanx[gguf]'") from error
    try:
        kind = GGMLQuantizationType(number)
        block, block_bytes = GGML_QUANT_SIZES[kind]
    except (ValueError, KeyError) as error:
        raise WeightError(f"unknown ggml type {number}: a newer gguf package may know it") from error
    dtype = _PLAIN.get(kind.name)
    if dtype is not None:
        return TensorType(kind.name, block, block_bytes, dtype, lambda data: torch.frombuffer(data, dtype=dtype))
    return TensorType(kind.name, block, block_bytes, torch.float32, _dequantizer(kind, block_bytes))


def _dequantizer(kind: Any, block_bytes: int) -> Callable[[bytearray], torch.Tensor]:
    import numpy
    from gguf.quants import dequantize

    def decode(data: bytearray) -> torch.Tensor:
        return torch.from_numpy(dequantize(numpy.frombuffer(data, numpy.uint8), kind))

    try:
        decode(bytearray(block_bytes))
    except NotImplementedError as error:
        raise WeightError(f"the gguf package cannot dequantise {kind.name}") from error
    return decode
