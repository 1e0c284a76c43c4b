"""Not DeepSpeed: what transformers and accelerate call on DeepSpeed, handed on to Phalanx."""

from importlib.metadata import version as _version

__version__ = _version("deepspeed")
if "+phalanx" not in __version__:
    raise ImportError(
        f"two packages are called deepspeed: DeepSpeed {__version__} is installed, and Phalanx's stand-in is found "
        "before it. Keep one: pip uninstall deepspeed, then pip install ./shim; or take the stand-in off the path"
    )

from phalanx import add_config_arguments, get_accelerator, init_distributed, set_autotp_mode, tp_model_init
from phalanx.training.hf_deepspeed import DeepSpeedEngine, initialize

from . import accelerator, checkpoint, comm, ops, runtime, utils, zero

__all__ = [
    "DeepSpeedEngine",
    "accelerator",
    "add_config_arguments",
    "checkpoint",
    "comm",
    "get_accelerator",
    "init_distributed",
    "initialize",
    "ops",
    "runtime",
    "set_autotp_mode",
    "tp_model_init",
    "utils",
    "zero",
]
