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
        """The containers of the layers, found as ``<prefix>.<index>.<name>``; classes may differ from layer to layer."""
        self._prefixes = _names(prefixes)
        self._layers = list(containers)

    def set_non_transformer_params(self, container: LayerContainer) -> None:
        """The container of everything outside the layers; it sees whole names."""
        self._rest = container

    def set_unmapped_params(self, prefixes: str | Iterable[str]) -> None:
        """Names, prefixes or patterns that are ignored."""
        for text in _names(prefixes):
            whole = ".*".join(re.escape(part) for part in text.split("*"))
            self._unmapped.append(re.compile(whole + r"(\..*)?"))

    def begin(self, names: Iterable[str] | Mapping[str, Sequence[int]]) -> None:
        """Announces all source names that will come, with their shapes where known; settles what will not.

        Raises:
            WeightError: listing *all* unknown names, missing tensors and wrong shapes. Nothing has been read then.
        """
        shapes = dict(names) if isinstance(names, Mapping) else dict.fromkeys(names)
        problems: list[str] = []
        arriving: dict[int, list[Target]] = {id(container): [] for container in self._containers()}
        for name, shape in shapes.items():
            try:
                found = self._locate(name)
            except ValueError as error:
                problems.append(str(error))
                continue
            if found is None:
                continue
            container, relative = found
            for target in container.resolve(relative):
                arriving[id(container)].append(target)
                problems += _shape_problems(name, shape, container, target)
        for container, prefix in self._labelled():
            problems += _absent(container, arriving[id(container)], prefix)
        if problems:
            raise WeightError(*problems)
        for container in self._containers():
            container.settle(arriving[id(container)])

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
        """Settles optional dependencies that were never announced, and checks that all is there.

        Raises:
            WeightError: listing *everything* that is missing.
        """
        for container in self._containers():
            container.settle(())
        problems = [
            f"missing: {prefix}{name}" for container, prefix in self._labelled() for name in container.missing()
        ]
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
            if not name.startswith(prefix + ".") or not index.isdigit():
                continue
            if int(index) >= len(self._layers):
                raise ValueError(f"unknown tensor {name!r}: the model has layers 0 to {len(self._layers) - 1}")
            container = self._layers[int(index)]
            if not container.resolve(relative):
                raise ValueError(f"unknown tensor {name!r}: {type(container).__name__} has no rule{container.near(relative)}")
            return container, relative
        if self._rest is not None and self._rest.resolve(name):
            return self._rest, name
        known = ", ".join(f"{prefix}.*" for prefix in self._prefixes)
        hint = self._rest.near(name) if self._rest is not None else ""
        raise ValueError(f"unknown tensor {name!r}: neither under {known or 'a layer prefix'} nor outside the layers{hint}")


def _names(value: str | Iterable[str]) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value)


def _shape_problems(
    name: str, shape: Sequence[int] | None, container: LayerContainer, target: Target
) -> list[str]:
    parameter = getattr(container, target.parameter)
    if shape is None or not isinstance(parameter, ParameterBase):
        return []
    expected = parameter.expected_shape(target.dependency, len(shape))
    if expected is None or tuple(expected) == tuple(shape):
        return []
    return [f"wrong shape: {name} is {tuple(shape)}, the config asks for {tuple(expected)}"]


def _absent(container: LayerContainer, arriving: list[Target], prefix: str) -> list[str]:
    """Tensors that the container needs and that will not come."""
    coming = {(target.parameter, target.dependency) for target in arriving}
    indices = {(target.parameter, target.dependency, target.index) for target in arriving}
    problems = []
    for name in container.parameters:
        parameter = getattr(container, name)
        if not isinstance(parameter, ParameterBase):
            continue
        for dependency in parameter.dependencies.values():
            sources = container.sources_of(name, dependency.name) or [f"{name}.{dependency.name}"]
            if dependency.list_type is not None:
                length = len(parameter.values[dependency.name])
                gone = [i for i in range(length) if (name, dependency.name, i) not in indices]
                problems += [f"missing: {prefix}{sources[0].replace('*', str(i))}" for i in gone]
            elif (name, dependency.name) not in coming:
                if not dependency.optional or parameter.required(dependency.name):
                    problems.append(f"missing: {prefix}{sources[0]}")
            elif dependency.optional and parameter.required(dependency.name) is False:
                problems.append(f"not expected: {prefix}{sources[0]}: the config says that the model has none")
    return problems
