"""Activations by their Hugging Face names, alone and as the gate of a gated MLP."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType

import torch
from torch import Tensor
from torch.nn import functional as F

from phalanx.ops import registry


def _laplace(x: Tensor, mu: float = 0.707107, sigma: float = 0.282095) -> Tensor:
    return 0.5 * (1.0 + torch.erf((x - mu) / (sigma * 2.0**0.5)))


_gelu_tanh = partial(F.gelu, approximate="tanh")

# The names of transformers' ACT2FN that have no parameters of their own. Its spellings of the tanh form differ only in
# how they round.
FUNCTIONS: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType(
    {
        "gelu": F.gelu,
        "gelu_10": lambda x: F.gelu(x).clamp(-10, 10),
        "gelu_accurate": _gelu_tanh,
        "gelu_fast": _gelu_tanh,
        "gelu_new": _gelu_tanh,
        "gelu_python": F.gelu,
        "gelu_python_tanh": _gelu_tanh,
        "gelu_pytorch_tanh": _gelu_tanh,
        "hardswish": F.hardswish,
        "laplace": _laplace,
        "leaky_relu": F.leaky_relu,
        "linear": lambda x: x,
        "mish": F.mish,
        "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
        "relu": F.relu,
        "relu2": lambda x: F.relu(x).square(),
        "relu6": F.relu6,
        "sigmoid": torch.sigmoid,
        "silu": F.silu,
        "sqrtsoftplus": lambda x: F.softplus(x).sqrt(),
        "swish": F.silu,
        "tanh": torch.tanh,
    }
)


def check_activation(name: str) -> str:
    """The name itself, if it is known. ValueError, with the nearest names, if not: for use when a model is read."""
    if name not in FUNCTIONS:
        near = difflib.get_close_matches(name, FUNCTIONS) or sorted(FUNCTIONS)
        raise ValueError(f"unknown activation {name!r}; known ones include {', '.join(near)}")
    return name


def activation(x: Tensor, name: str) -> Tensor:
    """The activation `name` of every element of x, any shape. Computes in fp32, rounds to x's dtype."""
    return registry.select("activation", device=x.device, dtype=x.dtype)(x, name)


def gated_activation(x: Tensor, name: str) -> Tensor:
    """x `[..., 2 I]` = gate | up -> `activation(gate) * up`, `[..., I]`. Computes in fp32, rounds to x's dtype."""
    return registry.select("gated_activation", device=x.device, dtype=x.dtype)(x, name)


def reference_activation(x: Tensor, name: str) -> Tensor:
    """`activation` in plain PyTorch."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return FUNCTIONS[check_activation(name)](wide).to(x.dtype)


def reference_gated_activation(x: Tensor, name: str) -> Tensor:
    """`gated_activation` in plain PyTorch."""
    if x.shape[-1] % 2:
        raise ValueError(f"gated_activation: the last dimension is gate | up, so it must be even; got {tuple(x.shape)}")
    gate, up = x.to(torch.promote_types(x.dtype, torch.float32)).chunk(2, -1)
    return (FUNCTIONS[check_activation(name)](gate) * up).to(x.dtype)


registry.register("activation", "reference", reference_activation)
registry.register("gated_activation", "reference", reference_gated_activation)
