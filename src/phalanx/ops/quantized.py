"""Linear weights in few bits: how they are quantised, and what a product with them means, in plain PyTorch.

- ``fp8``: e4m3 numbers with a scale for each output, of several the one that fits its numbers best; activations are
  e4m3 too, with a scale by the largest number of each token, whatever their number, so that a token's result does not
  depend on how many stand beside it.
- ``fp8_weights``: the same weights; activations stay as they are. What ``fp8`` means for narrow models.
- ``int8``: whole numbers from -127 to 127 with a scale for each output; activations stay as they are.
- ``int4``: numbers from 0 to 15 with a scale and an offset for each group of inputs of an output: 128 (64, 32 where
  that does not divide them), and 32 for weights of few inputs, since small models lose most.

Looking up and restoring give what the numbers stand for, which is near the original weight but not equal to it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from phalanx.ops import registry
from phalanx.ops.linear import PreparedWeight

LAYOUTS = ("fp8", "fp8_weights", "int8", "int4")
NARROW = 2048
"""Models of a smaller hidden size lose most by activations of 8 bits."""
FP8_MAX = 448.0
FP8_ROWS = "triton_fp8"
"""The name of implementations of other ops that leave their rows quantised beside what they return."""
# What the largest number of a weight's row may become; below half of that the same numbers come again.
FP8_TOPS = tuple(FP8_MAX * 2 ** (-step / 8) for step in range(8))
GROUPS = (128, 64, 32)
# Weights with fewer inputs than this have the smallest groups.
WIDE = 2304
# Parts of a group's range that are tried: leaving out the ends makes steps finer for the rest.
RANGES = (1.0, 0.96, 0.92, 0.88, 0.84, 0.8)
# Elements that are quantised at a time, so that what comes between stays small beside a weight.
CHUNK = 1 << 24


def weight_layout(quantization: str | None, hidden_size: int | None) -> str | None:
    """The layout that a setting ``quantization`` means for a model of this hidden size (the whole one, so that it is
    the same for any number of ranks): "fp8" is "fp8_weights" below NARROW. None: of unknown size."""
    narrow = hidden_size is not None and hidden_size < NARROW
    return "fp8_weights" if quantization == "fp8" and narrow else quantization


def quantize_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """x `[..., n]` -> e4m3 numbers of its shape and float32 scales `[...]`: `numbers * scale` is near x."""
    wide = x.float()
    scale = _largest(wide) / FP8_MAX
    scale = torch.where(scale > 0, scale, 1.0)
    return (wide / scale[..., None]).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn), scale


def quantize_fp8_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
    """`quantize_fp8` of a weight `[out, in]` whose scales are, of several within a factor of two, those with the least
    squared error: the largest numbers carry most of it, and the scale decides how near they are to numbers of e4m3."""
    wide = weight.float()
    largest = _largest(wide)
    best = torch.full_like(largest, torch.inf)
    # The plain one where nothing is better: where numbers are not finite, which must stay seen.
    scale = torch.where(largest > 0, largest / FP8_MAX, 1.0)
    for top in FP8_TOPS:
        tried = torch.where(largest > 0, largest / top, 1.0)
        numbers = (wide / tried[:, None]).clamp_(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn).float()
        wrong = numbers.mul_(tried[:, None]).sub_(wide).square_().sum(-1)
        scale = torch.where(wrong < best, tried, scale)
        best = torch.minimum(best, wrong)
    return (wide / scale[:, None]).clamp_(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn), scale


def quantize_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    """x `[..., n]` -> int8 numbers of its shape and float32 scales `[...]`."""
    wide = x.float()
    scale = _largest(wide) / 127
    # Not that of numbers that are not finite: it must stay seen.
    scale = torch.where(scale == 0, 1.0, scale)
    return (wide / scale[..., None]).round().clamp(-127, 127).to(torch.int8), scale


def quantize_int4(weight: Tensor, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """weight `[out, in]` -> numbers uint8 `[out, in]` from 0 to 15, scales and offsets `[in / group, out]`.

    `numbers * scale + offset` is near the weight. Scales and offsets are of its dtype. Of several ranges the one with
    the least squared error is taken.
    """
    wide = weight.float().unflatten(1, (-1, group))
    low, high = wide.amin(-1, keepdim=True), wide.amax(-1, keepdim=True)
    best = torch.full_like(low, torch.inf)
    # NaN where nothing is better: where numbers are not finite, which must stay seen.
    scale, offset = torch.ones_like(low), torch.full_like(low, torch.nan)
    for part in RANGES:
        step = _rounded((high - low) * (part / 15), weight.dtype)
        # Equal numbers are the offset.
        start = _rounded(torch.where(step > 0, (low + high) / 2 - step * 7.5, low), weight.dtype)
        step = torch.where(step > 0, step, 1.0)
        numbers = ((wide - start) / step).round().clamp(0, 15)
        wrong = (numbers * step + start - wide).square().sum(-1, keepdim=True)
        better = wrong < best
        best = torch.where(better, wrong, best)
        scale, offset = torch.where(better, step, scale), torch.where(better, start, offset)
    numbers = ((wide - offset) / scale).round().clamp(0, 15).to(torch.uint8)
    scale, offset = (tensor.squeeze(-1).T.to(weight.dtype).contiguous() for tensor in (scale, offset))
    return numbers.flatten(1), scale, offset


def pack_int4(numbers: Tensor) -> Tensor:
    """uint8 `[out, in]` -> uint8 `[out, in / 2]`: input j in column j's low bits, `in / 2 + j` in its high ones."""
    low, high = numbers.chunk(2, 1)
    return low | (high << 4)


def unpack_int4(data: Tensor) -> Tensor:
    """The reverse of `pack_int4`."""
    return torch.cat([data & 15, data >> 4], 1)


def int4_group(in_features: int) -> int:
    """The inputs that share a scale. ValueError for a number of inputs that no group divides."""
    for group in GROUPS if in_features >= WIDE else GROUPS[-1:]:
        if in_features % (2 * group) == 0:
            return group
    raise ValueError(
        f"int4 takes weights whose inputs on a rank are a multiple of {2 * GROUPS[-1]}; this one has {in_features}: "
        "use quantization='int8' or 'fp8', or another tensor_parallel_size"
    )


def _largest(x: Tensor) -> Tensor:
    return x.abs().amax(-1) if x.shape[-1] else x.new_zeros(x.shape[:-1])


def _rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype).float()


def _parts(weight: Tensor) -> tuple[Tensor, ...]:
    return weight.split(max(1, CHUNK // max(1, weight.shape[1])))


class QuantizedLinear(ABC):
    """What the layouts share. A subclass gives `prepare`, `restore` and, where it has a better way, `apply`."""

    @abstractmethod
    def prepare(self, weight: Tensor) -> PreparedWeight:
        """weight `[out, in]` in few bits."""

    @abstractmethod
    def restore(self, weight: PreparedWeight) -> Tensor:
        """What the numbers stand for, `[out, in]` of the weight's dtype: near the original, not equal to it."""

    def apply(self, x: Tensor, weight: PreparedWeight, bias: Tensor | None) -> Tensor:
        return F.linear(x, self.restore(weight), bias)

    def lookup(self, weight: PreparedWeight, ids: Tensor) -> Tensor:
        """Rows `ids` of `restore`."""
        return F.embedding(ids, self.restore(weight))


class ByteLinear(QuantizedLinear):
    """Numbers of a byte with a scale for each output: data `[out, in]`, aux `scale` float32 `[out]`."""

    layout: ClassVar[str]

    @abstractmethod
    def quantize(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """weight `[out, in]` -> numbers `[out, in]` and scales `[out]`."""

    def prepare(self, weight: Tensor) -> PreparedWeight:
        parts = [self.quantize(part) for part in _parts(weight)]
        data, scale = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
        return PreparedWeight(data, self.layout, weight.shape[0], weight.shape[1], weight.dtype, {"scale": scale})


class Fp8WeightLinear(ByteLinear):
    """The layout `fp8_weights`: data e4m3."""

    layout = "fp8_weights"

    def quantize(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        return quantize_fp8_weight(weight)

    def restore(self, weight: PreparedWeight) -> Tensor:
        return (weight.data.float() * weight.aux["scale"][:, None]).to(weight.dtype)


class Fp8Linear(Fp8WeightLinear):
    """The layout `fp8`: the same weights, multiplied with e4m3 activations."""

    layout = "fp8"

    def apply(self, x: Tensor, weight: PreparedWeight, bias: Tensor | None) -> Tensor:
        numbers, scale = quantize_fp8(x)
        out = F.linear(numbers.float(), weight.data.float()) * scale[..., None] * weight.aux["scale"]
        return (out if bias is None else out + bias.float()).to(x.dtype)


class Int8Linear(ByteLinear):
    """The layout `int8`: data int8."""

    layout = "int8"

    def quantize(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        return quantize_int8(weight)

    def restore(self, weight: PreparedWeight) -> Tensor:
        out = torch.empty(weight.data.shape, dtype=weight.dtype, device=weight.data.device)
        return torch.mul(weight.data, weight.aux["scale"][:, None], out=out)


class Int4Linear(QuantizedLinear):
    """The layout `int4`: data uint8 `[out, in / 2]`, aux `scale` and `offset` `[in / group, out]` of the dtype."""

    layout = "int4"

    def prepare(self, weight: Tensor) -> PreparedWeight:
        group = int4_group(weight.shape[1])
        packed = []
        for part in _parts(weight):
            numbers, scale, offset = quantize_int4(part, group)
            packed.append((pack_int4(numbers), scale, offset))
        data, scale, offset = (torch.cat(t, dim) for t, dim in zip(zip(*packed, strict=True), (0, 1, 1), strict=True))
        aux = {"scale": scale, "offset": offset}
        return PreparedWeight(data, "int4", weight.shape[0], weight.shape[1], weight.dtype, aux)

    def restore(self, weight: PreparedWeight) -> Tensor:
        scale, offset = (weight.aux[name].T.float()[..., None] for name in ("scale", "offset"))
        numbers = unpack_int4(weight.data).float().unflatten(1, (scale.shape[1], -1))
        return (numbers * scale + offset).flatten(1).to(weight.dtype)


# Below 0: never chosen for a weight that nobody asked to quantise.
for _backend in (Fp8Linear(), Fp8WeightLinear(), Int8Linear(), Int4Linear()):
    registry.register("linear", _backend.layout, _backend, priority=-20)
