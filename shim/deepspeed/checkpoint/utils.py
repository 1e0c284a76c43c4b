"""`deepspeed.checkpoint.utils`."""

from phalanx.training.hf_deepspeed import clone_tensors_for_torch_save

__all__ = ["clone_tensors_for_torch_save"]
