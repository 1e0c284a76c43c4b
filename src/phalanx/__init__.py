"""Phalanx: declare a Transformer once, then serve it and train it on any number of devices.

The public names are loaded on first use, so that ``import phalanx`` costs nothing.
"""

from __future__ import annotations

import importlib

__version__ = "0.1.0"

_HOME_OF = {
    "AsyncLLM": "phalanx.engine",
    "DeepSpeedEngine": "phalanx.training.deepspeed",
    "EngineConfig": "phalanx.config",
    "FusedAdam": "phalanx.training.fused_adam",
    "Guide": "phalanx.engine",
    "InferenceEngine": "phalanx.engine",
    "LLM": "phalanx.engine",
    "Mesh": "phalanx.distributed.mesh",
    "POLICIES": "phalanx.models",
    "SamplingParams": "phalanx.engine",
    "TPTrainerMixin": "phalanx.training.hf",
    "TrainingEngine": "phalanx.training.engine",
    "add_config_arguments": "phalanx.training.deepspeed",
    "build_engine": "phalanx.engine",
    "comm": "phalanx.training",
    "from_pretrained": "phalanx.parallel",
    "get_accelerator": "phalanx.training.accelerator",
    "init_distributed": "phalanx.training.comm",
    "initialize": "phalanx.training.deepspeed",
    "parallelize": "phalanx.parallel",
    "set_autotp_mode": "phalanx.training.deepspeed",
    "tp_model_init": "phalanx.training.deepspeed",
}

__all__ = ["__version__", *_HOME_OF]


def __getattr__(name: str) -> object:
    """Import a public name from the module where it lives."""
    if name not in _HOME_OF:
        raise AttributeError(f"module 'phalanx' has no attribute {name!r}; its public names are {', '.join(__all__)}")
    home = _HOME_OF[name]
    # `comm` is a module; every other name is in one.
    value = (
        importlib.import_module(f"{home}.{name}") if name == "comm" else getattr(importlib.import_module(home), name)
    )
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME_OF})
