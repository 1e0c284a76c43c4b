"""Checkpoints that carry quantised weights, presented as what they stand for: plain floating-point tensors by their
logical names, dequantised as they are read.

Layouts, by their ``quantization_config``:
- "fp8" (DeepSeek-V3's and transformers' fine-grained fp8): e4m3 ``weight`` [out, in] with ``weight_scale_inv``, one
  scale a block of 128 x 128, or one in all.
- "compressed-tensors" of the format "float-quantized": e4m3 ``weight`` with ``weight_scale``, one a channel or in all.
- "awq" (AutoAWQ's gemm): 4 bits, eight outputs in an int32 in the order 0 2 4 6 1 3 5 7; ``qweight`` [in, out / 8],
  ``qzeros`` [in / group, out / 8], ``scales`` [in / group, out].
- "gptq" (AutoGPTQ): 4 or 8 bits, packed along the inputs: ``qweight`` [in * bits / 32, out], ``qzeros``
  [in / group, out * bits / 32], ``scales`` [in / group, out]; zeros are stored less one, but in "gptq_v2".
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from phalanx.weights.source import TensorInfo, WeightError, WeightSource, unknown_tensor

PACKINGS = ("fp8", "compressed-tensors", "awq", "gptq")
"""Values of ``quant_method`` that are read."""

_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where in an int32 output 0, 1, ... of eight lies, counted in nibbles."""


def check_packing(packing: Mapping[str, Any]) -> None:
    """Raises WeightError, by name, where a ``quantization_config`` is of a kind that is not read."""
    method = packing.get("quant_method") if isinstance(packing, Mapping) else packing
    if method not in PACKINGS:
        raise WeightError(f"quantization_config: {method!r} is not read; known are {', '.join(PACKINGS)}")
    wrong = {}
    if method == "awq":
        wrong = {"version": packing.get("version", "gemm") != "gemm", "bits": packing.get("bits", 4) != 4}
    elif method == "gptq":
        wrong = {"bits": packing.get("bits") not in (4, 8), "desc_act": bool(packing.get("desc_act"))}
    elif method == "compressed-tensors":
        wrong = {"format": packing.get("format") not in ("float-quantized", "naive-quantized")}
    for key, bad in wrong.items():
        if bad:
            raise WeightError(f"quantization_config: {method} with {key}={packing.get(key)!r} is not read")


def unpacked(source: WeightSource, packing: Mapping[str, Any] | None) -> WeightSource:
    """The source as its weights' values, given the ``quantization_config`` of its config; itself where there is none.

    Raises:
        WeightError: an unknown packing, or parts of a packed weight that are absent.
    """
    if not packing:
        return source
    check_packing(packing)
    return UnpackedSource(source, packing)


class Packed(ABC):
    """A packed weight [out, in]: what it will look like, and how its values are made."""

    info: TensorInfo

    @abstractmethod
    def read(self, index: tuple[slice, ...]) -> Tensor:
        """The box of it that two slices cut out."""


class UnpackedSource(WeightSource):
    """A source whose packed weights are read as plain ones.

    Args:
        source: the checkpoint's tensors.
        packing: its ``quantization_config``, checked.
    """

    def __init__(self, source: WeightSource, packing: Mapping[str, Any]) -> None:
        self._source = source
        names = set(source.names())
        method = packing["quant_method"]
        self._packed: dict[str, Packed] = {}
        used: set[str] = set()
        suffix = ".qweight" if method in ("awq", "gptq") else None
        for name in sorted(names):
            if suffix is not None and name.endswith(suffix):
                stem = name.removesuffix(suffix)
                parts = _parts(names, stem, ("qweight", "qzeros", "scales"))
                self._packed[f"{stem}.weight"] = _Grouped(source, parts, method == "awq", packing)
                used |= {*parts.values(), f"{stem}.g_idx"}
            elif suffix is None and name.endswith((".weight_scale", ".weight_scale_inv")):
                stem = name.rpartition(".")[0]
                if f"{stem}.weight" not in names:
                    raise WeightError(f"{name} is there, but not {stem}.weight, whose scale it is")
                self._packed[f"{stem}.weight"] = _Scaled(source, f"{stem}.weight", name, packing)
                used |= {f"{stem}.weight", name, f"{stem}.input_scale"}
        self._names = [*(name for name in source.names() if name not in used), *self._packed]

    def names(self) -> Sequence[str]:
        return self._names

    def info(self, name: str) -> TensorInfo:
        if name in self._packed:
            return self._packed[name].info
        if name not in self._names:
            raise unknown_tensor(name, self._names, "the checkpoint")
        return self._source.info(name)

    def read(self, name: str, index: tuple[slice, ...] | None = None) -> Tensor:
        packed = self._packed.get(name)
        if packed is None:
            self.info(name)
            return self._source.read(name, index)
        whole = (slice(None), slice(None))
        return packed.read(whole if index is None else (*index, *whole)[:2])

    def verify(self) -> list[str]:
        return self._source.verify()


def _parts(names: set[str], stem: str, kinds: Sequence[str]) -> dict[str, str]:
    parts = {kind: f"{stem}.{kind}" for kind in kinds}
    absent = [part for part in parts.values() if part not in names]
    if absent:
        raise WeightError(f"{stem}: a packed weight lacks {', '.join(absent)}")
    return parts


class _Scaled(Packed):
    """Numbers of one byte [out, in] with scales of blocks, channels or all."""

    def __init__(self, source: WeightSource, name: str, scale: str, packing: Mapping[str, Any]) -> None:
        self._source, self._name, self._scale = source, name, scale
        shape, dtype = source.info(name)
        if dtype != torch.float8_e4m3fn or len(shape) != 2:
            raise WeightError(f"{name}: a scaled weight is float8_e4m3fn [out, in], given {dtype} {list(shape)}")
        scales = source.info(scale).shape
        rows, columns = (scales if len(scales) == 2 else (*scales, 1, 1)[:2]) if scales else (1, 1)
        if len(scales) == 1 and scales[0] == shape[1] != shape[0]:
            raise WeightError(f"{scale}: scales of inputs are not read")
        block = packing.get("weight_block_size") if (rows > 1 and columns > 1) or "inv" in scale else None
        block = list(block or (1 if rows == shape[0] else shape[0], shape[1]))
        expected = tuple(-(-size // step) for size, step in zip(shape, block, strict=True))
        if (rows, columns) != expected:
            raise WeightError(f"{scale}: {list(scales)} scales for {list(shape)} in blocks of {block}")
        self._block, self._grid = block, expected
        self.info = TensorInfo(shape, torch.float32)

    def read(self, index: tuple[slice, ...]) -> Tensor:
        numbers = self._source.read(self._name, index).to(torch.float32)
        scales = self._source.read(self._scale).to(torch.float32).reshape(self._grid)
        for dim in range(2):
            size = self.info.shape[dim]
            places = torch.arange(size, device=scales.device)[index[dim]] // self._block[dim]
            scales = scales.index_select(dim, places)
        return numbers * scales


@dataclass
class _Grouped(Packed):
    """Numbers of 4 or 8 bits with a scale and a zero a group of inputs and output."""

    source: WeightSource
    parts: Mapping[str, str]
    awq: bool
    packing: Mapping[str, Any]

    def __post_init__(self) -> None:
        self.bits = int(self.packing.get("bits", 4))
        packed, dtype = self.source.info(self.parts["qweight"])
        groups, outputs = self.source.info(self.parts["scales"]).shape
        inputs = packed[0] if self.awq else packed[0] * 32 // self.bits
        if dtype != torch.int32 or inputs % groups or packed[1] != (outputs * self.bits // 32 if self.awq else outputs):
            raise WeightError(
                f"{self.parts['qweight']}: {dtype} {list(packed)} does not go with scales [{groups}, {outputs}]"
            )
        self.info = TensorInfo((outputs, inputs), self.source.info(self.parts["scales"]).dtype)

    def read(self, index: tuple[slice, ...]) -> Tensor:
        numbers = self.source.read(self.parts["qweight"])
        zeros = self.source.read(self.parts["qzeros"])
        scales = self.source.read(self.parts["scales"])
        if self.awq:
            numbers, zeros = (_unpack(t, 4, 1, _AWQ_PLACES) for t in (numbers, zeros))
        else:
            order = tuple(range(32 // self.bits))
            numbers, zeros = _unpack(numbers, self.bits, 0, order), _unpack(zeros, self.bits, 1, order)
            if self.packing.get("checkpoint_format", "gptq") != "gptq_v2":
                zeros = zeros + 1
        group = numbers.shape[0] // scales.shape[0]
        wide = scales.to(torch.float32).repeat_interleave(group, 0)
        values = (numbers - zeros.repeat_interleave(group, 0)).to(torch.float32) * wide
        return values.T[index].to(scales.dtype).contiguous()


def _unpack(packed: Tensor, bits: int, dim: int, places: Sequence[int]) -> Tensor:
    """The numbers that lie in int32 words along a dimension: the first of a word at place 0 of `places`, and so on."""
    shifts = torch.tensor(places, dtype=torch.int32, device=packed.device) * bits
    numbers = packed.unsqueeze(dim + 1) >> shifts.view(-1, *[1] * (packed.ndim - dim - 1))
    return (numbers & ((1 << bits) - 1)).flatten(dim, dim + 1)
