"""Random weights of a config's shapes, for benchmarks: nothing is read but the config."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from phalanx.weights.source import TensorInfo, WeightSource, unknown_tensor


class DummySource(WeightSource):
    """The tensors that transformers' module of this config has, with small random values; norms are ones.

    A tensor's values depend on its name and the kind of device only, so that every rank cuts the same tensor.

    Args:
        config: as in ``config.json``; its ``model_type`` must be one of transformers' causal LMs.
        device: where they are made.
    """

    def __init__(self, config: Mapping[str, Any], device: torch.device | str = "cpu") -> None:
        from transformers import CONFIG_MAPPING, AutoModelForCausalLM

        hf_config = CONFIG_MAPPING[config["model_type"]].from_dict(dict(config))
        with torch.device("meta"):
            module = AutoModelForCausalLM.from_config(hf_config)
        self._shapes = {name: tuple(tensor.shape) for name, tensor in module.named_parameters()}
        self._device = torch.device(device)
        self._dtype = getattr(hf_config, "dtype", None) or torch.float32

    def names(self) -> Sequence[str]:
        return list(self._shapes)

    def info(self, name: str) -> TensorInfo:
        if name not in self._shapes:
            raise unknown_tensor(name, self._shapes, "the model")
        return TensorInfo(self._shapes[name], self._dtype)

    def read(self, name: str, index: tuple[slice, ...] | None = None) -> Tensor:
        shape, dtype = self.info(name)
        whole = torch.empty(shape, dtype=dtype, device=self._device)
        if len(shape) == 1:
            whole.fill_(1 if name.endswith("weight") else 0)
        else:
            whole.normal_(0, 0.02, generator=torch.Generator(self._device).manual_seed(crc32(name.encode())))
        return whole if index is None else whole[index].clone()
