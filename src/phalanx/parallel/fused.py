"""Norms, gated MLPs and the loss of a model computed by one kernel each, where they compute what the kernels do.

A module changes its class in place, as linears do when they are cut: to a subclass whose forward calls the kernel. It
does so only if its forward is, to the byte, one of those below; anything else stays as it is. On a device or in a dtype
that the kernels are not for, the module's own forward runs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from phalanx.distributed.group import SoloGroup
from phalanx.parallel.head import computes_causal_loss, loss_options
from phalanx.parallel.layers import joined
from phalanx.parallel.loss import causal_lm_loss

_WIDEST_NORM = 1 << 14
_FLOATS = (torch.bfloat16, torch.float16, torch.float32)


def fuse(model: nn.Module) -> list[str]:
    """Lets kernels compute what they can of a model; returns the names of the modules, and "loss" for the loss.

    Raises ImportError where Triton is not installed.
    """
    if find_spec("triton") is None:
        raise ImportError("fused kernels need Triton: install it, or switch fused_kernels off")
    changed = []
    for name, module in model.named_modules():
        mixin = _mixin_for(module)
        if mixin is not None:
            module.__class__ = joined(mixin, type(module))
            changed.append(name)
    for module in model.modules():
        if computes_causal_loss(module):
            module.loss_function = _whole_loss  # type: ignore[assignment]
            changed.append("loss")
    return changed


class _FusedNorm(nn.Module):
    weight: Tensor
    variance_epsilon: float

    def forward(self, x: Tensor) -> Tensor:
        if not _takes(x, self.weight) or x.shape[-1] > _WIDEST_NORM:
            return super().forward(x)
        out: Tensor = _RMSNorm.apply(x, self.weight, float(self.variance_epsilon))
        return out


class _FusedMLP(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        own: Any = self
        gate, up = own.gate_proj(x), own.up_proj(x)
        if not _takes(gate, up) or gate.shape != up.shape:
            return own.down_proj(own.act_fn(gate) * up)
        return own.down_proj(_SiLUMul.apply(gate, up))


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        from phalanx.ops.triton.training import rms_norm_forward

        rows = x.reshape(-1, x.shape[-1]).contiguous()
        y, rstd = rms_norm_forward(rows, weight, eps)
        ctx.save_for_backward(rows, weight, rstd)
        return y.view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> Any:
        from phalanx.ops.triton.training import rms_norm_backward

        rows, weight, rstd = ctx.saved_tensors
        dx, dweight = rms_norm_backward(rows, weight, rstd, g.reshape(rows.shape).contiguous())
        return dx.view(g.shape), dweight, None


class _SiLUMul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        from phalanx.ops.triton.training import silu_mul_forward

        gate, up = gate.contiguous(), up.contiguous()
        ctx.save_for_backward(gate, up)
        return silu_mul_forward(gate, up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> Any:
        from phalanx.ops.triton.training import silu_mul_backward

        gate, up = ctx.saved_tensors
        return silu_mul_backward(gate, up, g.contiguous())


def _whole_loss(logits: Tensor, labels: Tensor | None = None, vocab_size: int = 0, **kwargs: Any) -> Tensor:
    """transformers' loss of a causal LM over logits that are whole."""
    width = logits.shape[-1]
    return causal_lm_loss(logits, labels, range(width), width, SoloGroup(), **loss_options(kwargs))


_whole_loss.__name__ = "ForCausalLMLoss"


def _takes(x: Tensor, other: Tensor) -> bool:
    return x.is_cuda and x.dtype == other.dtype and x.dtype in _FLOATS and not torch.compiler.is_compiling()


def _mixin_for(module: nn.Module) -> type[nn.Module] | None:
    kind = type(module)
    forward = inspect.unwrap(kind.forward)
    if not inspect.isfunction(forward):
        return None
    if any(_same(forward, known) for known in _NORMS) and isinstance(getattr(module, "weight", None), nn.Parameter):
        return _FusedNorm
    if _same(forward, _mlp) and type(module.act_fn).__name__ in ("SiLU", "SiLUActivation"):
        return _FusedMLP
    return None


def _same(forward: Callable[..., Any], known: Callable[..., Any]) -> bool:
    """Whether two functions have the same code, whatever their variables are called."""
    one, other = forward.__code__, known.__code__
    return (one.co_code, one.co_names, one.co_consts[1:]) == (other.co_code, other.co_names, other.co_consts[1:])


def _llama_norm(self: Any, hidden_states: Tensor) -> Tensor:
    """That of Llama, Mistral, Qwen, Phi-3 and many others."""
    input_dtype = hidden_states.dtype
    hidden_states = hidden_states.to(torch.float32)
    variance = hidden_states.pow(2).mean(-1, keepdim=True)
    hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
    return self.weight * hidden_states.to(input_dtype)


def _mlp(self: Any, x: Tensor) -> Tensor:
    """That of the same families."""
    down_proj = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
    return down_proj


_NORMS = (_llama_norm,)
