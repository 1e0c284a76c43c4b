"""Adam and AdamW whose step on a GPU is one kernel over all parameters. DeepSpeed's arguments, torch's state."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import ParamsT

_PLAIN = (Tensor, nn.Parameter)
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)

# Of a param group: what the kernel does not compute, or for what torch keeps the counts of steps on the device.
_NOT_OURS = ("amsgrad", "maximize", "capturable", "differentiable", "fused")

# On the CPU, as the counts of steps are: of a Python number a tensor would be made for each of them.
_ONE = torch.tensor(1.0)

Trained = tuple[Tensor, Tensor, dict[str, Any]]
"""A parameter, its gradient and its state, which is empty before its first step."""


class FusedAdam(torch.optim.AdamW):
    """Adam with decoupled weight decay, or with an L2 penalty (`adam_w_mode=False`), at the speed of a GPU's memory.

    Its arguments and defaults are those of DeepSpeed's FusedAdam; its state and `state_dict` are those of
    `torch.optim.AdamW` (or `Adam`), and each loads what the other has saved. The kernel computes in fp32, and takes
    float32, bfloat16 and float16 in any mixture. A step that holds anything else is torch's own: tensors on a CPU,
    float64 or complex, sparse or not contiguous, of a subclass of Tensor, a rate that lies on the GPU, a group with
    `amsgrad` or `maximize`, a CUDA graph that is being captured, and all where Triton is not installed.

    Raises ValueError for `bias_correction=False`, `amsgrad=True` and `set_grad_none=False`.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        if not bias_correction:
            raise ValueError("bias_correction=False: Adam without bias correction is not implemented; leave it on")
        if amsgrad:
            raise ValueError("amsgrad=True: FusedAdam has no AMSGrad, as DeepSpeed's; use torch.optim.AdamW")
        if not set_grad_none:
            raise ValueError("set_grad_none=False: zero_grad() frees gradients; call zero_grad(set_to_none=False)")
        if not isinstance(adam_w_mode, bool):
            raise ValueError(f"adam_w_mode is {adam_w_mode!r}: expected True or False")
        # Adam's, because AdamW's knows one kind of weight decay only.
        super(torch.optim.AdamW, self).__init__(
            params, lr, betas, eps, weight_decay, decoupled_weight_decay=adam_w_mode
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's. Raises ValueError for what is a setting of the optimizer, not of a group."""
        wrong = [key for key in ("bias_correction", "adam_w_mode", "set_grad_none") if key in param_group]
        if wrong:
            raise ValueError(f"a param group with {', '.join(wrong)}: these are settings of FusedAdam as a whole")
        super().add_param_group(param_group)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """The weight decay stays as it was made, and how another optimizer computed its steps is left behind."""
        # A copy has no groups yet: those that it is given are its own.
        made = [group["decoupled_weight_decay"] for group in self.__dict__.get("param_groups", ())]
        super(torch.optim.AdamW, self).__setstate__(state)
        for group in self.param_groups:
            group.update(fused=None, foreach=None, capturable=False, differentiable=False)
        for group, decoupled in zip(self.param_groups, made, strict=False):
            group["decoupled_weight_decay"] = decoupled
        for kept in self.state.values():
            if "step" in kept:
                kept["step"] = kept["step"].cpu()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update; returns what `closure`, which computes the loss and its gradients anew, returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        trained = _trained(self.param_groups, self.state)
        if trained is None or not _launches():
            _torch_step()(self)
        else:
            for group, found in zip(self.param_groups, trained, strict=True):
                _update(group, found, self.state)
        return loss


def kind_of(optimizer: torch.optim.Optimizer) -> str:
    """The name of the class whose state an optimizer keeps: FusedAdam's is that of torch's AdamW or Adam."""
    if isinstance(optimizer, FusedAdam):
        return "AdamW" if optimizer.defaults["decoupled_weight_decay"] else "Adam"
    return type(optimizer).__name__


def _trained(
    groups: Sequence[Mapping[str, Any]], states: Mapping[Tensor, dict[str, Any]]
) -> list[list[Trained]] | None:
    """What has a gradient, by group; None unless the kernel is for all of it."""
    found: list[list[Trained]] = []
    for group in groups:
        numbers = group["lr"], *group["betas"]
        if any(group[key] for key in _NOT_OURS) or any(isinstance(n, Tensor) and not n.is_cpu for n in numbers):
            return None
        found.append([])
        for parameter in group["params"]:
            gradient = parameter.grad
            if gradient is None:
                continue
            state = states.get(parameter, {})
            moments = (state["exp_avg"], state["exp_avg_sq"]) if state else ()
            if not _on_gpu(parameter) or gradient.is_neg() or not _are_alike(parameter, gradient, *moments):
                return None
            found[-1].append((parameter, gradient, state))
    return found


def _on_gpu(parameter: Tensor) -> bool:
    return parameter.is_cuda


def _are_alike(*tensors: Tensor) -> bool:
    """Whether flat memory on one device is all there is to them."""
    device = tensors[0].get_device()
    for tensor in tensors:
        if type(tensor) not in _PLAIN or tensor.dtype not in _FLOATS or tensor.get_device() != device:
            return False
        if tensor.layout is not torch.strided or not tensor.is_contiguous():
            return False
    return True


def _launches() -> bool:
    """Whether a kernel with this step's numbers may be launched: a graph that is captured would keep them for ever."""
    captured = torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
    return find_spec("triton") is not None and not captured and not torch.compiler.is_compiling()


def _torch_step() -> Callable[[torch.optim.Optimizer], Any]:
    """torch's step without the hooks that torch puts around the step of a class: those around ours have run."""
    step: Any = torch.optim.AdamW.step
    own: Callable[[torch.optim.Optimizer], Any] = step.__wrapped__ if getattr(step, "hooked", False) else step
    return own


def _update(group: Mapping[str, Any], trained: list[Trained], states: dict[Tensor, dict[str, Any]]) -> None:
    from phalanx.ops.triton.adam import Row, adam_step

    if not trained:
        return
    for place, (parameter, gradient, state) in enumerate(trained):
        if not state:
            moments = {key: torch.zeros_like(parameter) for key in ("exp_avg", "exp_avg_sq")}
            states[parameter] = {"step": torch.tensor(0.0, dtype=torch.float32), **moments}
            trained[place] = parameter, gradient, states[parameter]
    torch._foreach_add_([state["step"] for _, _, state in trained], _ONE)
    # A parameter that had no gradient in some step counts fewer of them.
    by_step: dict[float, list[Row]] = {}
    for parameter, gradient, state in trained:
        row = parameter, gradient, state["exp_avg"], state["exp_avg_sq"]
        by_step.setdefault(state["step"].item(), []).append(row)
    beta1, beta2 = map(float, group["betas"])
    settings: dict[str, Any] = {key: float(group[key]) for key in ("lr", "eps", "weight_decay")}
    for step, rows in by_step.items():
        adam_step(rows, step=step, betas=(beta1, beta2), decoupled=group["decoupled_weight_decay"], **settings)
    # As after any operation in place: a graph that needs the old values must not be walked.
    torch.autograd.graph.increment_version([parameter for parameter, _, _ in trained])
