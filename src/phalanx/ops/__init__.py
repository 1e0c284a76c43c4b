"""What a forward computes: plain functions over tensors, each with a PyTorch reference and faster back ends."""

from importlib.util import find_spec as _find_spec

import torch as _torch

# Importing them registers their implementations.
from phalanx.ops import activation as activation
from phalanx.ops import attention as attention
from phalanx.ops import cpu as cpu
from phalanx.ops import linear as linear
from phalanx.ops import moe as moe
from phalanx.ops import norm as norm
from phalanx.ops import quantized as quantized
from phalanx.ops import rope as rope
from phalanx.ops import sampling as sampling
from phalanx.ops import step_inputs as step_inputs
from phalanx.ops import token_mask as token_mask

if _torch.version.cuda is not None:
    from phalanx.ops import cuda as cuda

if _torch.version.cuda is not None and _find_spec("triton") is not None:
    from phalanx.ops import triton as triton
