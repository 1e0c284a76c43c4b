"""`deepspeed.runtime.zero.partition_parameters`: what transformers changes while DeepSpeed makes a model in shards."""

from collections.abc import Callable
from typing import Any

import torch

_orig_torch_arange = torch.arange


def zero_wrapper_for_fp_tensor_constructor(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Callable[..., Any]:
    """The constructor itself: `zero.Init` changes no dtypes here."""
    return fn
