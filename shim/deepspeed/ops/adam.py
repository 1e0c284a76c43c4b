"""`deepspeed.ops.adam`."""

from phalanx import FusedAdam

__all__ = ["FusedAdam"]
