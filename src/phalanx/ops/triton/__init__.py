"""Triton kernels of the ops, for CUDA devices. A module here registers its implementations when it is imported."""

from phalanx.ops.triton import activation as activation
from phalanx.ops.triton import attention as attention
from phalanx.ops.triton import attention_invariant as attention_invariant
from phalanx.ops.triton import fp8_linear as fp8_linear
from phalanx.ops.triton import greedy as greedy
from phalanx.ops.triton import grouped as grouped
from phalanx.ops.triton import invariant as invariant
from phalanx.ops.triton import linear as linear
from phalanx.ops.triton import norm as norm
from phalanx.ops.triton import quantized_linear as quantized_linear
from phalanx.ops.triton import rope as rope
from phalanx.ops.triton import step_inputs as step_inputs
from phalanx.ops.triton import token_mask as token_mask
