"""`deepspeed.accelerator`."""

from phalanx import get_accelerator

__all__ = ["get_accelerator"]
