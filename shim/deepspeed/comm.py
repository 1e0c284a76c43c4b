"""`deepspeed.comm`."""

from phalanx.training.comm import *  # noqa: F403
