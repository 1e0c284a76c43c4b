"""`deepspeed.runtime.engine`."""

from phalanx.training.hf_deepspeed import DeepSpeedEngine

__all__ = ["DeepSpeedEngine"]
