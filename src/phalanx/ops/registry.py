"""Which implementation of an op runs: a table of registered functions, chosen by device, dtype and priority.

An op has one signature and several implementations. `select` takes the supporting one of the highest priority, or the
one that the user names. A user's own implementation joins by `register`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

Supports = Callable[[torch.device, torch.dtype], bool]


@dataclass(frozen=True)
class Implementation:
    """One way to run an op. `function` is what `select` returns: a function, or for `linear` a `LinearBackend`."""

    name: str
    function: Any
    supports: Supports
    priority: int
    features: frozenset[str] = frozenset()


@dataclass
class _Op:
    implementations: dict[str, Implementation] = field(default_factory=dict)
    chosen: dict[tuple[str, torch.dtype, str | None, frozenset[str]], Any] = field(default_factory=dict)


_TABLE: dict[str, _Op] = {}


def anywhere(device: torch.device, dtype: torch.dtype) -> bool:
    """The predicate of an implementation that runs on every device and dtype."""
    return True


def register(
    op: str,
    name: str,
    function: Any,
    *,
    supports: Supports = anywhere,
    priority: int = 0,
    features: Iterable[str] = (),
) -> None:
    """Adds the implementation `name` of `op`. A name that is there already is replaced.

    `supports(device, dtype)` says whether it can run; it is asked once for each device type and dtype, at the first
    use. Among those that can, the highest priority is chosen (the references have 0), the latest among equals.
    `features`: which optional arguments of the op it has, by name; it is never chosen for a call that needs another.
    """
    entry = _TABLE.setdefault(op, _Op())
    entry.implementations.pop(name, None)
    entry.implementations[name] = Implementation(name, function, supports, priority, frozenset(features))
    entry.chosen.clear()


def unregister(op: str, name: str) -> None:
    """Removes the implementation `name` of `op`. ValueError if there is none."""
    _named(op, name)
    del _TABLE[op].implementations[name]
    _TABLE[op].chosen.clear()


def implementations(op: str) -> list[Implementation]:
    """All implementations of `op`, in the order of their registration. ValueError for an unknown op."""
    return list(_entry(op).implementations.values())


def select(
    op: str,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    forced: str | None = None,
    needs: frozenset[str] = frozenset(),
) -> Any:
    """The implementation of `op` that runs tensors of `dtype` on `device` and has the features `needs`; `forced`
    names one.

    ValueError, with the choices, for an unknown op, an unknown forced name, and where nothing supports the request.
    """
    device_type = device.type if isinstance(device, torch.device) else torch.device(device).type
    entry = _TABLE.get(op) or _entry(op)
    key = (device_type, dtype, forced, needs)
    function = entry.chosen.get(key)
    if function is None:
        function = entry.chosen[key] = _choose(op, torch.device(device_type), dtype, forced, needs).function
    return function


def _choose(
    op: str, device: torch.device, dtype: torch.dtype, forced: str | None, needs: frozenset[str]
) -> Implementation:
    able = [i for i in _entry(op).implementations.values() if needs <= i.features and i.supports(device, dtype)]
    choices = ", ".join(i.name for i in able) or "none"
    wanted = " with ".join([f"{dtype} on {device.type}", *([", ".join(sorted(needs))] if needs else [])])
    if forced is not None:
        if _named(op, forced) not in able:
            raise ValueError(f"{op}: {forced!r} does not support {wanted}; those that do: {choices}")
        return _TABLE[op].implementations[forced]
    if not able:
        known = ", ".join(_TABLE[op].implementations)
        raise ValueError(f"{op}: nothing supports {wanted}; registered: {known}")
    return max(reversed(able), key=lambda i: i.priority)


def _entry(op: str) -> _Op:
    if op not in _TABLE:
        raise ValueError(f"unknown op {op!r}; registered ops: {', '.join(sorted(_TABLE)) or 'none'}")
    return _TABLE[op]


def _named(op: str, name: str) -> Implementation:
    known = _entry(op).implementations
    if name not in known:
        raise ValueError(f"{op}: no implementation named {name!r}; choose one of: {', '.join(known)}")
    return known[name]
