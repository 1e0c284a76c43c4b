"""ContainerMap: which container a checkpoint name belongs to."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from phalanx.models.container import LayerContainer, Target
from phalanx.models.parameter import ParameterBase
from phalanx.weights import WeightError


class ContainerMap:
    """Classifies checkpoint names: *transformer* (one container a layer), *non-transformer* (one container), *unmapped*
    (ignored on purpose). Prefixes end at a dot; an unmapped name may also be a pattern with ``*``.

    Filling it: ``begin`` with all names that will come, then ``map_param`` for each in any order, then ``validate``.
    """

    def __init__(self) -> None:
        self._prefixes: tuple[str, ...] = ()
        self._layers: list[LayerContainer] = []
        self._rest: LayerContainer | None = None
        self._unmapped: list[re.Pattern[str]] = []

    @property
    def transformer_params(self) -> list[LayerContainer]:
        return self._layers

    @property
    def non_transformer_params(self) -> LayerContainer | None:
        return self._rest

    def set_transformer_params(self, prefixes: str | Iterable[str], containers: Sequence[LayerContainer]) -> None:
        """The containers of the layers, found as ``<prefix>.<index>.<name>``; their classes may differ."""
        self._prefixes = _names(prefixes)
        self._layers = list(containers)

    def set_non_transformer_params(self, container: LayerContainer) -> None:
        """The container of everything outside the layers; it sees whole names."""
        self._rest = container

    def set_unmapped_params(self, prefixes: str | Iterable[str]) -> None:
        """Names, prefixes or patterns that are ignored, beside those of earlier calls."""
        for text in _names(prefixes):
            whole = ".*".join(re.escape(part) for part in text.split("*"))
            self._unmapped.append(re.compile(whole + r"(\..*)?"))

    def begin(self, names: Iterable[str] | Mapping[str, Sequence[int] | None], problems: Iterable[str] = ()) -> None:
        """Announces all source names that will come, with their shapes where known; settles what will not.

        Args:
            problems: found elsewhere, to be listed with those found here.

        Raises:
            WeightError: listing *all* problems: unknown names, missing tensors, tensors that the config has no use for,
                dependencies fed twice, wrong shapes. Nothing has been read then.
        """
        shapes = dict(names) if isinstance(names, Mapping) else dict.fromkeys(names)
        found = list(problems)
        coming: dict[LayerContainer, dict[Target, str]] = {container: {} for container in self._containers()}
        for name, shape in shapes.items():
            try:
                place = self._locate(name)
            except ValueError as error:
                found.append(str(error))
                continue
            if place is None:
                continue
            container, relative = place
            for target in container.resolve(relative):
                first = coming[container].setdefault(target, name)
                if first != name:
                    found.append(f"fed twice: {name} and {first} are both {type(container).__name__}.{target}")
                found += _misfits(name, shape, container, target)
        for container, prefix in self._labelled():
            found += _absent(container, set(coming[container]), prefix)
        if found:
            raise WeightError(*found)
        for container, targets in coming.items():
            container.settle(targets)

    def knows(self, name: str) -> bool:
        """Whether a tensor of this name has a place, or is ignored on purpose."""
        try:
            self._locate(name)
        except ValueError:
            return False
        return True

    def map_param(self, name: str, value: Any) -> None:
        """Routes one tensor (or lazy file tensor) to its container; unmapped names are dropped.

        Raises:
            ValueError: a name that nothing knows; the nearest known ones are named.
        """
        found = self._locate(name)
        if found is not None:
            container, relative = found
            container.set_dependency(relative, value)

    def validate(self) -> None:
        """Settles optional dependencies that were never announced, and checks that all is there, on the model's device.

        Raises:
            WeightError: listing *everything* that is missing.
        """
        problems: list[str] = []
        for container, prefix in self._labelled():
            container.settle(())
            missing = container.missing()
            problems += [f"missing: {prefix}{name}" for name in missing]
            if not missing and not container.is_initialized:
                label = prefix or "outside the layers: "
                problems.append(f"{label}{type(container).__name__} is not finalised, or not on the model's device")
        if problems:
            raise WeightError(*problems)

    def _containers(self) -> list[LayerContainer]:
        return self._layers + ([self._rest] if self._rest is not None else [])

    def _labelled(self) -> list[tuple[LayerContainer, str]]:
        prefix = self._prefixes[0] if self._prefixes else "layers"
        labelled = [(container, f"{prefix}.{index}.") for index, container in enumerate(self._layers)]
        return labelled + ([(self._rest, "")] if self._rest is not None else [])

    def _locate(self, name: str) -> tuple[LayerContainer, str] | None:
        """The container of a name and the name inside it; None for an unmapped name; ValueError for an unknown one."""
        if any(pattern.fullmatch(name) for pattern in self._unmapped):
            return None
        for prefix in self._prefixes:
            index, _, relative = name.removeprefix(prefix + ".").partition(".")
            if not name.startswith(prefix + ".") or not index.isdecimal():
                continue
            if int(index) >= len(self._layers):
                raise ValueError(f"unknown tensor {name!r}: the model has layers 0 to {len(self._layers) - 1}")
            container = self._layers[int(index)]
            if not container.resolve(relative):
                kind = type(container).__name__
                raise ValueError(f"unknown tensor {name!r}: {kind} has no rule for it{container.near(relative)}")
            return container, relative
        if self._rest is not None and self._rest.resolve(name):
            return self._rest, name
        known = " or ".join(f"{prefix}.<layer>" for prefix in self._prefixes) or "a layer prefix"
        hint = self._rest.near(name) if self._rest is not None else ""
        raise ValueError(f"unknown tensor {name!r}: it is neither under {known} nor known outside the layers{hint}")


def _names(value: str | Iterable[str]) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value)


def _misfits(name: str, shape: Sequence[int] | None, container: LayerContainer, target: Target) -> list[str]:
    """What is wrong with a tensor of this shape for what it feeds."""
    parameter = getattr(container, target.parameter)
    if not isinstance(parameter, ParameterBase):
        return [f"fed twice: {name} is for {type(container).__name__}.{target.parameter}, which is finalised"]
    if target.place is not None and target.place >= len(parameter.values[target.dependency]):
        count = len(parameter.values[target.dependency])
        return [f"unknown tensor {name!r}: {type(container).__name__}.{target}, but the model has {count} of them"]
    expected = None if shape is None else parameter.expected_shape(target.dependency, len(shape))
    if shape is None or expected is None or tuple(expected) == tuple(shape):
        return []
    return [f"wrong shape: {name} is {tuple(shape)}, the config asks for {tuple(expected)}"]


def _absent(container: LayerContainer, coming: set[Target], prefix: str) -> list[str]:
    """Tensors that the container needs and that will not come, or that come and that it must not have."""
    problems = []
    for name in container.parameters:
        parameter = getattr(container, name)
        if not isinstance(parameter, ParameterBase):
            continue
        for dependency in parameter.dependencies.values():
            target = Target(name, dependency.name)
            label = f"{prefix}{container.source_of(target)}"
            if dependency.list_type is not None:
                places = [target._replace(place=place) for place in range(len(parameter.values[dependency.name]))]
                problems += [f"missing: {prefix}{container.source_of(each)}" for each in places if each not in coming]
            elif target not in coming:
                if not dependency.optional or parameter.required(dependency.name):
                    problems.append(f"missing: {label}")
            elif dependency.optional and parameter.required(dependency.name) is False:
                problems.append(f"not expected: {label}: a trait of the model says that there is none")
    return problems
