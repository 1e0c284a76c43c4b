"""`deepspeed.runtime.lr_schedules`."""

from phalanx.training.schedules import SCHEDULES

VALID_LR_SCHEDULES = list(SCHEDULES)
