"""`deepspeed.runtime`."""

from . import engine, lr_schedules, zero

__all__ = ["engine", "lr_schedules", "zero"]
