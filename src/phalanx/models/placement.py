"""Placement: where a model's parameters go, and which back ends compute with them."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor

from phalanx.config import EngineConfig
from phalanx.distributed.group import Group
from phalanx.layout.partition import Partition, local_shape, shard_into
from phalanx.models.hf_config import ModelConfigError
from phalanx.ops import registry
from phalanx.ops.quantized import FP8_ROWS, NARROW, weight_layout
from phalanx.ops.quantized import LAYOUTS as QUANTIZED_LAYOUTS

log = logging.getLogger("phalanx")

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
"""What a checkpoint's tensors may be; anything else would need its scales."""

INVARIANT_OPS = {"attention": "triton_invariant", "linear": "invariant"}
"""What batch invariance asks for on a GPU."""


class Placement:
    """Where parameters go: rank and world, device and dtype, and the back ends that the user forced.

    Args:
        group: the tensor-parallel group.
        device, dtype: of parameters and activations.
        forced: op -> implementation name.
        quantization: of the projections' weights, as in EngineConfig; None leaves them as they are.
        kv_dtype: of cached keys and values; None: as activations.
        batch_invariant: only products and attention whose results for a row do not depend on others.
        hidden_size: of the whole model, which decides what quantization="fp8" means; None takes it for a wide one.

    Attributes:
        quantization: the layout that the weights get, "fp8_weights" where "fp8" was asked for a narrow model.
        asked_quantization: as it was given, for what is said to the user.

    Raises:
        ValueError: an unknown op, or an implementation that is unknown or not for this device and dtype; a forced
            linear layer together with quantization, or one that quantises; one that contradicts batch invariance.
    """

    def __init__(
        self,
        group: Group,
        device: torch.device,
        dtype: torch.dtype,
        forced: dict[str, str],
        quantization: str | None = None,
        kv_dtype: torch.dtype | None = None,
        batch_invariant: bool = False,
        hidden_size: int | None = None,
    ) -> None:
        self.group = group
        self.device = device
        self.dtype = dtype
        self.kv_dtype = kv_dtype or dtype
        self.batch_invariant = batch_invariant
        if batch_invariant and quantization is not None:
            raise ValueError(f"batch_invariant is not there for quantization={quantization!r}: leave out one of them")
        if batch_invariant and device.type == "cuda":
            against = {op: name for op, name in forced.items() if INVARIANT_OPS.get(op, name) != name}
            if against:
                raise ValueError(f"batch_invariant chooses {INVARIANT_OPS}, but ops force {against}: leave out one")
            forced = {**forced, **INVARIANT_OPS}
        self.fuses_gates = "gated_activation" not in forced
        self.asked_quantization = quantization
        self.quantization = weight_layout(quantization, hidden_size)
        if self.quantization == "fp8":
            forced = {**fp8_ops(device, dtype), **forced}
        self.forced = forced
        for name in forced:
            self.op(name)
        linear_layer = forced.get("linear")
        if linear_layer is not None and quantization is not None:
            raise ValueError(
                f"quantization={quantization!r} chooses the linear layers, so they cannot be forced to "
                f"{linear_layer!r} too: leave out one of them"
            )
        if linear_layer is not None and getattr(self.op("linear"), "layout", None) in QUANTIZED_LAYOUTS:
            raise ValueError(
                f"ops linear={linear_layer!r} would quantise every weight: use quantization, which leaves head and "
                "embeddings as they are"
            )

    @classmethod
    def of(
        cls, config: EngineConfig, group: Group, device: torch.device, dtype: torch.dtype, hidden_size: int
    ) -> Placement:
        """As an engine's settings say, for a model of this hidden size (the whole one, not a rank's part)."""
        kv_dtype = torch.float8_e4m3fn if config.kv_cache_dtype == "fp8" else dtype
        placement = cls(
            group, device, dtype, dict(config.ops), config.quantization, kv_dtype, config.batch_invariant, hidden_size
        )
        if group.rank == 0 and placement.quantization != config.quantization:
            log.info(
                "the model's hidden size is below %d: quantization=%r quantises weights alone, as %r",
                NARROW,
                config.quantization,
                placement.quantization,
            )
        return placement

    def cut(self, value: Any, partition: Partition, dtype: torch.dtype | None = None) -> Tensor:
        """This rank's part of a full tensor (or lazy file tensor), in the model's dtype, on its device.

        It owns its memory: what becomes of the source later does not change it.
        """
        shape = local_shape(partition, value.shape, self.group.rank, self.group.size)
        out = torch.empty(shape, dtype=dtype or self.dtype, device=self.device)
        self.cut_into(out, value, partition)
        return out

    def cut_into(self, out: Tensor, value: Any, partition: Partition) -> None:
        """The same into memory that is there already.

        Raises:
            ValueError: the tensor does not hold plain floating-point numbers, as those of a quantised checkpoint.
        """
        if value.dtype not in FLOATS:
            raise ValueError(f"holds {value.dtype}, expected one of {', '.join(map(str, FLOATS))}")
        shard_into(out, value, partition, self.group.rank, self.group.size)

    def op(self, name: str, needs: frozenset[str] = frozenset()) -> Any:
        """The implementation of an op for this device and dtype that has the optional features ``needs``."""
        return registry.select(name, device=self.device, dtype=self.dtype, forced=self.forced.get(name), needs=needs)


def fp8_ops(device: torch.device, dtype: torch.dtype) -> dict[str, str]:
    """What leaves its rows quantised for a product with e4m3 weights, where there is such an implementation."""
    return {
        op: FP8_ROWS
        for op in ("rms_norm", "add_rms_norm", "gated_activation")
        for each in registry.implementations(op)
        if each.name == FP8_ROWS and each.supports(device, dtype)
    }


def device_of(config: EngineConfig, group: Group) -> torch.device:
    """The device of a rank."""
    if config.device == "cpu" or (config.device == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ModelConfigError("device 'cuda' was asked for, but torch sees no GPU here: use device='cpu'")
    return torch.device("cuda", group.rank % torch.cuda.device_count())
