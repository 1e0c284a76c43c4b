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

    A tensor's values depend on its name only, so that every rank cuts the same tensor.

    Args:
        config: as in ``config.json``; its ``model_type`` must be one of transformers' causal LMs.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        from transformers import CONFIG_MAPPING, AutoModelForCausalLM

        hf_config = CONFIG_MAPPING[config["model_type"]].from_dict(dict(config))
        with torch.device("meta"):
            module = AutoModelForCausalLM.from_config(hf_config)
        self._shapes = {name: tuple(tensor.shape) for name, tensor in module.named_parameters()}
        self._dtype = getattr(hf_config, "dtype", None) or torch.float32

    def names(self) -> Sequence[str]:
        return list(self._shapes)

    def info(self, name: str) -> TensorInfo:
        if name not in self._shapes:
            raise unknown_tensor(name, self._shapes, "the model")
        return TensorInfo(self._shapes[name], self._dtype)

    def read(self, name: str, index: tuple[slice, ...] | None = None) -> Tensor:
        shape, dtype = self.info(name)
        if len(shape) == 1:
            whole = torch.ones(shape, dtype=dtype) if name.endswith("weight") else torch.zeros(shape, dtype=dtype)
        else:
            random = torch.Generator().manual_seed(crc32(name.encode()))
            whole = torch.empty(shape, dtype=dtype).normal_(0, 0.02, generator=random)
        return whole if index is None else whole[index].clone()
