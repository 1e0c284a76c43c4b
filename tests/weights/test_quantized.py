"""Packed checkpoints: what is packed here by the formats' own rules is read back, whole, in parts and as a model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from phalanx import build_engine
from phalanx.weights import MemorySource, WeightError
from phalanx.weights.quantized import unpacked
from tests.models.tiny import llama, llama_config

Packer = Callable[[Tensor], tuple[dict[str, Tensor], Tensor]]
"""A weight [out, in] -> the tensors that stand for it, by suffix, and the weight that they stand for."""

AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]


def words(numbers: Tensor, bits: int, order: list[int]) -> Tensor:
    """Numbers [n, m] packed along the last dimension: the i-th place of a word holds number order[i]."""
    per = 32 // bits
    packed = torch.zeros(numbers.shape[0], numbers.shape[1] // per, dtype=torch.int64)
    for place in range(per):
        packed |= numbers[:, order[place] :: per].long() << (bits * place)
    return torch.where(packed >= 1 << 31, packed - (1 << 32), packed).to(torch.int32)


def grouped(weight: Tensor, bits: int, group: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Numbers [in, out], zeros and scales [groups, out], and what they stand for, [out, in]."""
    columns = weight.T.unflatten(0, (-1, group))
    low, high = columns.amin(1), columns.amax(1)
    scales = ((high - low) / (2**bits - 1)).to(torch.float16)
    zeros = (-low / scales.float()).round().clamp(1, 2**bits - 1)
    numbers = (columns / scales.float()[:, None] + zeros[:, None]).round().clamp(0, 2**bits - 1)
    values = (numbers - zeros[:, None]) * scales.float()[:, None]
    return numbers.flatten(0, 1), zeros, scales, values.flatten(0, 1).T


def awq(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    numbers, zeros, scales, values = grouped(weight, 4, 8)
    parts = {"qweight": words(numbers, 4, AWQ_ORDER), "qzeros": words(zeros, 4, AWQ_ORDER), "scales": scales}
    return parts, values.to(torch.float16)


def gptq(bits: int, less: int) -> Packer:
    def pack(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        numbers, zeros, scales, values = grouped(weight, bits, 8)
        order = list(range(32 // bits))
        parts = {
            "qweight": words(numbers.T.contiguous(), bits, order).T.contiguous(),
            "qzeros": words(zeros - less, bits, order),
            "scales": scales,
            "g_idx": torch.arange(weight.shape[1], dtype=torch.int32) // 8,
        }
        return parts, values.to(torch.float16)

    return pack


def fp8_channels(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    scale = weight.abs().amax(1, keepdim=True) / 448
    numbers = (weight / scale).to(torch.float8_e4m3fn)
    return {"weight": numbers, "weight_scale": scale}, numbers.float() * scale


def fp8_blocks(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    rows, columns = weight.shape
    scale = torch.empty(-(-rows // 16), -(-columns // 16))
    values, numbers = torch.empty_like(weight), torch.empty(rows, columns, dtype=torch.float8_e4m3fn)
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            box = (slice(16 * i, 16 * i + 16), slice(16 * j, 16 * j + 16))
            scale[i, j] = weight[box].abs().max() / 448
            numbers[box] = (weight[box] / scale[i, j]).to(torch.float8_e4m3fn)
            values[box] = numbers[box].float() * scale[i, j]
    return {"weight": numbers, "weight_scale_inv": scale}, values


FORMATS: dict[str, tuple[dict[str, Any], Packer]] = {
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 8, "version": "gemm"}, awq),
    "gptq 4": ({"quant_method": "gptq", "bits": 4, "group_size": 8, "desc_act": False}, gptq(4, 1)),
    "gptq 8": ({"quant_method": "gptq", "bits": 8, "group_size": 8, "desc_act": False}, gptq(8, 1)),
    "gptq v2": ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "gptq_v2"}, gptq(4, 0)),
    "compressed": ({"quant_method": "compressed-tensors", "format": "float-quantized"}, fp8_channels),
    "fp8": ({"quant_method": "fp8", "weight_block_size": [16, 16]}, fp8_blocks),
}


@pytest.mark.parametrize("kind", FORMATS)
def test_values_and_parts_of_them(kind: str) -> None:
    packing, pack = FORMATS[kind]
    parts, values = pack(torch.randn(40, 24, generator=torch.Generator().manual_seed(0)))
    source = unpacked(MemorySource({f"a.{name}": part for name, part in parts.items()} | {"b": torch.ones(3)}), packing)
    assert sorted(source.names()) == ["a.weight", "b"]
    assert source.info("a.weight").shape == (40, 24)
    torch.testing.assert_close(source.read("a.weight"), values.to(source.info("a.weight").dtype))
    box = (slice(5, 23), slice(3, 20))
    torch.testing.assert_close(source.read("a.weight", box), source.read("a.weight")[box])
    torch.testing.assert_close(source.read("a.weight", box[:1]), source.read("a.weight")[box[:1]])


@pytest.mark.parametrize("kind", FORMATS)
def test_a_model_of_packed_weights_is_the_model_of_their_values(kind: str, tmp_path: Path) -> None:
    packing, pack = FORMATS[kind]
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = llama(llama_config(**sizes), seed=1)
    packed: dict[str, Tensor] = {}
    plain: dict[str, Tensor] = {}
    for name, weight in model.state_dict().items():
        if "_proj" in name:
            parts, values = pack(weight.detach())
            packed |= {f"{name.removesuffix('weight')}{suffix}": part for suffix, part in parts.items()}
            plain[name] = values.float()
        else:
            packed[name] = plain[name] = weight.detach()
    config = model.config.to_dict()
    settings: dict[str, Any] = {"num_blocks": 8, "dtype": "float32"}
    found = build_engine(packed, hf_config={**config, "quantization_config": packing}, **settings)
    expected = build_engine(plain, hf_config=config, **settings)
    torch.testing.assert_close(found.put([0], [[1, 2, 3, 4]]), expected.put([0], [[1, 2, 3, 4]]))


def test_what_is_not_read_is_refused_by_name() -> None:
    source = MemorySource({"a.qweight": torch.zeros(2, 2, dtype=torch.int32)})
    with pytest.raises(WeightError, match="'bitsandbytes' is not read; known are fp8"):
        unpacked(source, {"quant_method": "bitsandbytes"})
    with pytest.raises(WeightError, match="gptq with desc_act=True is not read"):
        unpacked(source, {"quant_method": "gptq", "bits": 4, "desc_act": True})
    with pytest.raises(WeightError, match=r"a packed weight lacks a.qzeros, a.scales"):
        unpacked(source, {"quant_method": "awq"})
    with pytest.raises(WeightError, match="does not go with scales"):
        parts = {"a.qweight": torch.zeros(9, 2, dtype=torch.int32), "a.qzeros": torch.zeros(2, 2, dtype=torch.int32)}
        unpacked(MemorySource(parts | {"a.scales": torch.ones(2, 16)}), {"quant_method": "awq"})
    with pytest.raises(WeightError, match="known are fp8"):
        config = {**llama_config().to_dict(), "quantization_config": {"quant_method": "hqq"}}
        build_engine(llama(llama_config(), seed=1).state_dict(), hf_config=config, num_blocks=4)
