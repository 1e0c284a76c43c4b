"""In which dtypes a run computes and sums, and the loss scale that keeps fp16 gradients from vanishing."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

_NARROW = (torch.bfloat16, torch.float16)
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Precision:
    """`compute`: torch.bfloat16 or torch.float16 with fp32 master weights and moments, or None: parameters as they are.

    `accumulate`: in which a rank sums its gradients over backward passes; None chooses it. `passes`: backward passes a
    step. `narrow`: no fp32 master weights, the optimizer updates the parameters themselves.
    """

    compute: torch.dtype | None = None
    accumulate: torch.dtype | None = None
    passes: int = 1
    narrow: bool = False

    @classmethod
    def of(cls, config: Any) -> Precision:
        """What a `TrainingConfig` asks for. Raises ValueError if it enables both bf16 and fp16."""
        if config.bf16.enabled and config.fp16.enabled:
            raise ValueError("bf16 and fp16 are both enabled: enable one")
        compute = torch.bfloat16 if config.bf16.enabled else torch.float16 if config.fp16.enabled else None
        name = config.data_types.grad_accum_dtype
        if name is not None and name not in _DTYPES:
            raise ValueError(f"data_types.grad_accum_dtype is {name!r}: expected one of {', '.join(_DTYPES)}")
        accumulate = None if name is None else _DTYPES[name]
        narrow = config.bf16.bf16_master_weights_and_grads
        return cls(compute, accumulate, config.gradient_accumulation_steps, narrow)

    def param_dtype(self, given: torch.dtype) -> torch.dtype:
        """What a parameter that was `given` computes in."""
        return given if self.compute is None else self.compute

    def master_dtype(self, given: torch.dtype) -> torch.dtype:
        """What the optimizer updates."""
        if self.compute is None:
            return given
        return self.compute if self.narrow else torch.float32

    def gradient_dtype(self, given: torch.dtype, *, held: bool) -> torch.dtype:
        """In which gradients are summed on a rank and travel. `held`: they are kept from pass to pass.

        Many small 16-bit numbers added to a large one are lost, so sums over several passes are fp32 unless the config
        says otherwise.
        """
        if self.compute is None:
            return given
        if self.accumulate is not None:
            return self.accumulate
        return torch.float32 if held and self.passes > 1 else self.compute

    def reduce_dtype(self) -> torch.dtype | None:
        """In which stage 3 sums over the ranks; None: in the parameters' own."""
        return None if self.compute is None else self.accumulate or torch.float32

    def check(self, module: nn.Module) -> None:
        """Raises ValueError for parameters in a 16-bit dtype that the config does not enable."""
        if self.compute is not None:
            return
        narrow = [
            f"{n} ({p.dtype})" for n, p in module.named_parameters() if p.dtype in (torch.bfloat16, torch.float16)
        ]
        if narrow:
            raise ValueError(
                f"{len(narrow)} parameters have a 16-bit dtype, but the config enables neither bf16 nor fp16: "
                f'{", ".join(narrow[:3])}. Say {{"bf16": {{"enabled": true}}}} (fp32 master weights are kept), or load '
                "the model in float32"
            )

    def cast(self, module: nn.Module, trained: set[str]) -> None:
        """Cast the parameters that are not trained (the others are cast with their buckets); buffers keep theirs."""
        if self.compute is None:
            return
        for name, parameter in module.named_parameters():
            if name not in trained and parameter.is_floating_point():
                parameter.data = parameter.data.to(self.compute)


@dataclass
class LossScale:
    """The number by which a loss is multiplied before backward, so that small fp16 gradients do not become zero.

    With `guarded`, steps whose gradient is not finite are skipped. Static, or `dynamic`: halved when a gradient is not
    finite, doubled after `window` steps without one. `hysteresis`: overflows it takes to halve it; counted anew when
    the scale grows, or after each good step if `consecutive`. The arithmetic is DeepSpeed's (DynamicLossScaler).
    """

    scale: float = 1.0
    guarded: bool = False
    dynamic: bool = False
    window: int = 1000
    hysteresis: int = 2
    minimum: float = 1.0
    consecutive: bool = False
    patience: int = 2
    step: int = 0
    last_overflow: int = -1

    @classmethod
    def of(cls, config: Any) -> LossScale:
        """What a `TrainingConfig` asks for: without fp16 the scale is 1, and no step is skipped."""
        fp16 = config.fp16
        if not fp16.enabled:
            return cls()
        if fp16.loss_scale:
            return cls(float(fp16.loss_scale), guarded=True)
        return cls(
            2.0**fp16.initial_scale_power,
            guarded=True,
            dynamic=True,
            window=fp16.loss_scale_window,
            hysteresis=fp16.hysteresis,
            minimum=float(fp16.min_loss_scale),
            consecutive=fp16.consecutive_hysteresis,
            patience=fp16.hysteresis,
        )

    def skips(self, norm: Tensor) -> bool:
        """Whether a step with this gradient norm must be left out. Reads the device only where the answer depends."""
        return self.guarded and not bool(norm.isfinite())

    def update(self, *, overflow: bool) -> None:
        """After each step. Raises FloatingPointError where the scale would have to fall below its minimum."""
        if not self.dynamic:
            return
        if overflow:
            self._lower()
        else:
            if self.consecutive:
                self.patience = self.hysteresis
            if (self.step - self.last_overflow) % self.window == 0:
                self.patience = self.hysteresis
                self.scale *= 2
        self.step += 1

    def _lower(self) -> None:
        self.last_overflow = self.step
        if self.patience > 1:
            self.patience -= 1
            return
        if self.scale <= self.minimum:
            raise FloatingPointError(
                f"gradients are not finite although the loss scale is at its minimum of {self.minimum}: the loss "
                "itself has become infinite or NaN, or the model needs bf16"
            )
        self.scale = max(self.scale / 2, self.minimum)

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers that `load_state_dict` reads."""
        return asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state_dict` was taken, if both scales move; what the config says stays as it is.

        Raises ValueError for keys that `state_dict` does not write.
        """
        unknown = set(state) ^ set(asdict(self))
        if unknown:
            raise ValueError(f"not a state of a loss scale: {sorted(unknown)} missing or unknown")
        if self.dynamic and state["dynamic"]:
            self.scale, self.step = max(state["scale"], self.minimum), state["step"]
            self.last_overflow, self.patience = state["last_overflow"], min(state["patience"], self.hysteresis)
