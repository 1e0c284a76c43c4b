"""`deepspeed.runtime.zero`."""

from . import partition_parameters

__all__ = ["partition_parameters"]
