"""Model weights in and out."""

from phalanx.weights.embedded import pull_smollm2
from phalanx.weights.hf_folder import write_hf_folder
from phalanx.weights.memory import MemorySource
from phalanx.weights.open import open_source
from phalanx.weights.safetensors_source import SafetensorsSource
from phalanx.weights.source import SourceTensor, TensorInfo, WeightError, WeightSource
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
