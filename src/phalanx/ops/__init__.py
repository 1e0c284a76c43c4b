"""What a forward computes: plain functions over tensors, each with a PyTorch reference and faster back ends."""

from phalanx.ops import cpu as cpu  # registers its implementations
