"""Learning-rate schedules by the names of DeepSpeed's config, with the meaning that they have there.

A schedule counts optimizer steps: at iteration -1 it sets the first rate, and `step()` after each optimizer step goes
on to 0, 1, ... Note that WarmupLR and its kin stay at the first rate for the first two steps, as DeepSpeed's do.

Source: DeepSpeed 0.19.8, `runtime/lr_schedules.py`. The papers: https://arxiv.org/abs/1803.09820 (OneCycle and the
range test), https://arxiv.org/abs/1608.03983 (cosine).
"""

from __future__ import annotations

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

import torch
from torch.optim import Optimizer, lr_scheduler

from phalanx.config import ConfigError

Rate = float | Sequence[float]
"""One rate for all parameter groups, or one for each."""


class Schedule(ABC):
    """Sets the rates of an optimizer's parameter groups; `last_batch_iteration` counts optimizer steps from 0."""

    def __init__(self, optimizer: Optimizer, last_batch_iteration: int = -1) -> None:
        self.optimizer = optimizer
        self.last_batch_iteration = last_batch_iteration
        self._last_lr: list[float] = []
        if last_batch_iteration == -1:
            self._apply()

    @abstractmethod
    def get_lr(self) -> list[float]:
        """The rate of each parameter group at `last_batch_iteration`."""

    def get_last_lr(self) -> list[float]:
        """The rates that were set last."""
        return list(self._last_lr)

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Go on by one optimizer step, or to the iteration that is given."""
        given = last_batch_iteration
        self.last_batch_iteration = self.last_batch_iteration + 1 if given is None else given
        self._apply()

    def state_dict(self) -> dict[str, int]:
        """What `load_state_dict` needs."""
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go to where `state_dict` was taken, and set the rates of that place."""
        self.last_batch_iteration = state["last_batch_iteration"]
        self._apply()

    def _apply(self) -> None:
        self._last_lr = self.get_lr()
        for group, rate in zip(self.optimizer.param_groups, self._last_lr, strict=True):
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    def _each(self, value: Rate, name: str) -> list[float]:
        """`value` for each parameter group."""
        groups = len(self.optimizer.param_groups)
        if isinstance(value, (int, float)):
            return [float(value)] * groups
        if len(value) != groups:
            raise ConfigError(f"scheduler.params.{name}: {len(value)} values for {groups} parameter groups")
        return [float(item) for item in value]


class LRRangeTest(Schedule):
    """Rates that grow without end from `min_lr`: by `step_rate` times `min_lr` every `step_size` steps."""

    def __init__(
        self,
        optimizer: Optimizer,
        lr_range_test_min_lr: Rate = 1e-3,
        lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False,
        last_batch_iteration: int = -1,
    ) -> None:
        self.optimizer = optimizer
        self.min_lr = self._each(lr_range_test_min_lr, "lr_range_test_min_lr")
        self.step_size = _count(lr_range_test_step_size, "lr_range_test_step_size")
        self.step_rate = lr_range_test_step_rate
        self.staircase = lr_range_test_staircase
        super().__init__(optimizer, last_batch_iteration)

    def get_lr(self) -> list[float]:
        interval = float(self.last_batch_iteration + 1) / self.step_size
        if self.staircase:
            interval = math.floor(interval)
        return [rate * (1 + self.step_rate * interval) for rate in self.min_lr]


class OneCycle(Schedule):
    """Up from `cycle_min_lr` to `cycle_max_lr`, down again, then decay; the momentum (beta 1) the other way round.

    The momentum is left alone where the optimizer has no `betas`. A stair count above 0 makes stairs of a half cycle.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        cycle_min_lr: float,
        cycle_max_lr: float,
        decay_lr_rate: float = 0.0,
        cycle_first_step_size: int = 2000,
        cycle_second_step_size: int | None = None,
        cycle_first_stair_count: int = 0,
        cycle_second_stair_count: int | None = None,
        decay_step_size: int = 0,
        cycle_momentum: bool = True,
        cycle_min_mom: float = 0.8,
        cycle_max_mom: float = 0.9,
        decay_mom_rate: float = 0.0,
        last_batch_iteration: int = -1,
    ) -> None:
        self.first = float(_count(cycle_first_step_size, "cycle_first_step_size"))
        second = cycle_second_step_size
        self.second = self.first if second is None else float(_count(second, "cycle_second_step_size"))
        self.total = self.first + self.second
        second_stairs = cycle_second_stair_count
        self.stairs = (cycle_first_stair_count, cycle_first_stair_count if second_stairs is None else second_stairs)
        self.min_lr, self.max_lr = cycle_min_lr, cycle_max_lr
        self.min_mom, self.max_mom = cycle_min_mom, cycle_max_mom
        self.decay_step_size = decay_step_size
        self.decay_lr_rate, self.decay_mom_rate = decay_lr_rate, decay_mom_rate
        self.cycle_momentum = cycle_momentum and "betas" in optimizer.defaults
        super().__init__(optimizer, last_batch_iteration)

    def get_lr(self) -> list[float]:
        return [self._lr()] * len(self.optimizer.param_groups)

    def get_mom(self) -> list[tuple[float, float]] | None:
        """The betas of each parameter group, None where momentum is left alone."""
        if not self.cycle_momentum:
            return None
        return [(self._mom(), 0.99)] * len(self.optimizer.param_groups)

    def _apply(self) -> None:
        super()._apply()
        for group, betas in zip(self.optimizer.param_groups, self.get_mom() or [], strict=False):
            group["betas"] = betas

    def _lr(self) -> float:
        if self.last_batch_iteration == -1:
            return self.min_lr
        if self.last_batch_iteration < self.total:
            return self.min_lr + (self.max_lr - self.min_lr) * self._height()
        return self.min_lr / (1 + self.decay_lr_rate * self._decayed())

    def _mom(self) -> float:
        if self.last_batch_iteration == -1:
            return self.min_mom  # DeepSpeed's first step has the lowest momentum, the second nearly the highest
        if self.last_batch_iteration < self.total:
            return self.max_mom - (self.max_mom - self.min_mom) * self._height()
        return self.max_mom * (1 + self.decay_mom_rate * self._decayed())

    def _decayed(self) -> float:
        """Decay steps since the cycle ended; 0 where there is no decay."""
        if self.decay_step_size == 0:
            return 0.0
        return (self.last_batch_iteration - self.total + 1) / self.decay_step_size

    def _height(self) -> float:
        """Where the cycle stands, from 0 to 1."""
        at = (self.last_batch_iteration + 1) % self.total
        rising = at <= self.first
        height = at / self.first if rising else (self.total - at) / self.second
        stairs = self.stairs[0 if rising else 1]
        return math.floor(height * stairs) / stairs if stairs > 0 else height


class _Warmup(Schedule):
    """What the three warm-ups share: the way from 0 to 1."""

    def __init__(
        self, optimizer: Optimizer, warmup_num_steps: int, warmup_type: str, last_batch_iteration: int
    ) -> None:
        if warmup_type not in ("log", "linear"):
            raise ConfigError(f"scheduler.params.warmup_type: {warmup_type!r} is not 'log' or 'linear'")
        self.warmup_num_steps = max(2, _count(warmup_num_steps, "warmup_num_steps"))
        self.warmup_type = warmup_type
        super().__init__(optimizer, last_batch_iteration)

    def _warm(self) -> float:
        if self.warmup_type == "log":
            return math.log(self.last_batch_iteration + 1) / math.log(self.warmup_num_steps)
        return self.last_batch_iteration / self.warmup_num_steps


class WarmupLR(_Warmup):
    """From `warmup_min_lr` to `warmup_max_lr` (default: each group's rate) in `warmup_num_steps`, then constant."""

    def __init__(
        self,
        optimizer: Optimizer,
        warmup_min_lr: Rate = 0.0,
        warmup_max_lr: Rate | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self.optimizer = optimizer
        if warmup_max_lr is None:
            warmup_max_lr = [float(group["lr"]) for group in optimizer.param_groups]
        self.min_lrs = self._each(warmup_min_lr, "warmup_min_lr")
        self.max_lrs = self._each(warmup_max_lr, "warmup_max_lr")
        super().__init__(optimizer, warmup_num_steps, warmup_type, last_batch_iteration)

    def get_lr(self) -> list[float]:
        if self.last_batch_iteration < 0:
            return list(self.min_lrs)
        gamma = self._warm() if self.last_batch_iteration < self.warmup_num_steps else self._after()
        return [low + (high - low) * gamma for low, high in zip(self.min_lrs, self.max_lrs, strict=True)]

    def _after(self) -> float:
        return 1.0


class WarmupDecayLR(WarmupLR):
    """WarmupLR, then a straight line down to `warmup_min_lr` at `total_num_steps`."""

    def __init__(
        self,
        optimizer: Optimizer,
        total_num_steps: int,
        warmup_min_lr: Rate = 0.0,
        warmup_max_lr: Rate = 0.001,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self.total_num_steps = _count(total_num_steps, "total_num_steps")
        super().__init__(optimizer, warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type, last_batch_iteration)

    def _after(self) -> float:
        left = self.total_num_steps - self.last_batch_iteration
        return max(0.0, left / max(1.0, self.total_num_steps - self.warmup_num_steps))


class WarmupCosineLR(_Warmup):
    """Each group's own rate, times a ratio: up to 1 in `warmup_num_steps`, then half a cosine down to `cos_min_ratio`.

    Before the first step the rate is 0, whatever `warmup_min_ratio` is.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        total_num_steps: int,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 0.0001,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self.total_num_steps = _count(total_num_steps, "total_num_steps")
        self.warmup_min_ratio, self.cos_min_ratio = warmup_min_ratio, cos_min_ratio
        self.org_lrs = [float(group["lr"]) for group in optimizer.param_groups]
        super().__init__(optimizer, warmup_num_steps, warmup_type, last_batch_iteration)

    def get_lr_ratio(self) -> float:
        """The ratio at `last_batch_iteration`."""
        if self.last_batch_iteration < 0:
            return 0.0
        if self.last_batch_iteration < self.warmup_num_steps:
            return self.warmup_min_ratio + (1.0 - self.warmup_min_ratio) * self._warm()
        steps = max(1, self.total_num_steps - self.warmup_num_steps)
        progress = min(1.0, (self.last_batch_iteration - self.warmup_num_steps + 1) / steps)
        ratio = (1.0 + math.cos(math.pi * progress)) / 2.0
        return max(0.0, self.cos_min_ratio + (1.0 - self.cos_min_ratio) * ratio)

    def get_lr(self) -> list[float]:
        return [rate * self.get_lr_ratio() for rate in self.org_lrs]


SCHEDULES: dict[str, type[Schedule]] = {
    kind.__name__: kind for kind in (LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR, WarmupCosineLR)
}

# torch's own, as DeepSpeed takes them by name: those that are made of numbers and stepped without arguments.
_TORCH: dict[str, type[lr_scheduler.LRScheduler]] = {
    name: getattr(lr_scheduler, name)
    for name in (
        "ConstantLR",
        "CosineAnnealingLR",
        "CosineAnnealingWarmRestarts",
        "CyclicLR",
        "ExponentialLR",
        "LinearLR",
        "MultiStepLR",
        "OneCycleLR",
        "PolynomialLR",
        "StepLR",
    )
}


def schedule_maker(name: str, params: Mapping[str, Any]) -> Callable[[Optimizer], Any]:
    """What makes the schedule that a config's `scheduler.type` and `scheduler.params` name, given an optimizer.

    One of `SCHEDULES`, or a class of `torch.optim.lr_scheduler`. Raises ConfigError for an unknown name, and for
    keyword arguments that the schedule does not take or lacks; what makes it, for values that do not fit.
    """
    kinds: dict[str, type[Any]] = {**SCHEDULES, **_TORCH}
    if name not in kinds:
        near = get_close_matches(name, kinds, n=2) or [kind for kind in kinds if kind.lower() == name.lower()]
        hint = f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(kinds)}"
        raise ConfigError(f"scheduler.type: {name!r} is unknown; {hint}")
    kind = kinds[name]
    known = {key: each for key, each in inspect.signature(kind).parameters.items() if key != "optimizer"}
    for key in params:
        if key not in known:
            near = get_close_matches(key, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(known)}"
            raise ConfigError(f"scheduler.params.{key}: {name} has no such setting; {hint}")
    lacking = [key for key, each in known.items() if each.default is each.empty and key not in params]
    if lacking:
        raise ConfigError(f"scheduler.params: {name} needs {', '.join(lacking)}")
    return lambda optimizer: kind(optimizer, **params)


def _count(value: Any, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"scheduler.params.{name}: expected a whole number above 0, given {value!r}")
    return value
