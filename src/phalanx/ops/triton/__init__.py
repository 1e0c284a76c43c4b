"""Triton kernels of the ops, for CUDA devices. A module here registers its implementations when it is imported."""

from phalanx.ops.triton import attention as attention
from phalanx.ops.triton import linear as linear
