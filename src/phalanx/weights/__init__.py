"""Model weights in and out.

The names are loaded on first use, so that a packaged model is pulled, and a mistyped one told, without PyTorch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from phalanx.weights.embedded import pull_smollm2
    from phalanx.weights.hf_folder import write_hf_folder
    from phalanx.weights.memory import MemorySource
    from phalanx.weights.names import WeightError
    from phalanx.weights.open import open_source
    from phalanx.weights.safetensors_source import SafetensorsSource
    from phalanx.weights.source import SourceTensor, TensorInfo, WeightSource
    from phalanx.weights.torch_bin import TorchBinSource

__all__ = [
    "MemorySource",
    "SafetensorsSource",
    "SourceTensor",
    "TensorInfo",
    "TorchBinSource",
    "WeightError",
    "WeightSource",
    "open_source",
    "pull_smollm2",
    "write_hf_folder",
]

_HOME_OF = {
    "MemorySource": "memory",
    "SafetensorsSource": "safetensors_source",
    "SourceTensor": "source",
    "TensorInfo": "source",
    "TorchBinSource": "torch_bin",
    "WeightError": "names",
    "WeightSource": "source",
    "open_source": "open",
    "pull_smollm2": "embedded",
    "write_hf_folder": "hf_folder",
}


def __getattr__(name: str) -> object:
    """Import a public name from the module where it lives."""
    if name not in _HOME_OF:
        raise AttributeError(f"module 'phalanx.weights' has no attribute {name!r}")
    value: object = getattr(importlib.import_module(f"phalanx.weights.{_HOME_OF[name]}"), name)
    globals()[name] = value
    return value
