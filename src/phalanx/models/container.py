"""LayerContainer: the parameters of one layer, and which checkpoint name feeds which of them."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from phalanx.models.parameter import DeclarationError, InferenceParameter, ParameterBase, resolved_annotations

if TYPE_CHECKING:
    from phalanx.models.base import TransformerModel

MAPPING = "PARAM_MAPPING"


class Target(NamedTuple):
    """Where a checkpoint tensor goes: ``parameter.dependency``, and the index of a list's entry."""

    parameter: str
    dependency: str
    index: int | None = None


@dataclass(frozen=True)
class Rule:
    """One line of a PARAM_MAPPING: a source name, in which ``*`` stands for anything, and what it feeds."""

    source: str
    targets: tuple[Target, ...]
    pattern: re.Pattern[str]
    is_list: bool


class LayerContainer:
    """The parameters of a layer (or of all that is in no layer), declared by annotation.

    ``PARAM_MAPPING`` maps source names, relative to the layer, to ``"parameter.dependency"`` or several of them. A ``*``
    matches anything in a name; for lists there is exactly one, the index. Everything is checked when the class is
    defined. A subclass adds to what its bases declare and wins over them; mapping a source to None takes it out.

    Raises:
        DeclarationError: at class definition, naming the class, the rule and the valid choices.
    """

    PARAM_MAPPING: ClassVar[Mapping[str, Any]] = {}
    parameters: ClassVar[dict[str, type[ParameterBase]]] = {}
    rules: ClassVar[tuple[Rule, ...]] = ()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        parameters: dict[str, type[ParameterBase]] = {}
        mapping: dict[str, tuple[str, ...]] = {}
        for base in reversed(cls.__mro__[1:]):
            if issubclass(base, LayerContainer):
                parameters.update(vars(base).get("parameters", {}))
                mapping.update(vars(base).get("_mapping", {}))
        own = resolved_annotations(cls, sys._getframe(1))
        if MAPPING in own and MAPPING not in vars(cls):
            raise DeclarationError(f"{cls.__name__}: {MAPPING} is annotated but not assigned; write `{MAPPING} = {{...}}`")
        own = {name: kind for name, kind in own.items() if isinstance(kind, type) and issubclass(kind, ParameterBase)}
        for name, kind in own.items():
            if not kind.dependencies:
                raise DeclarationError(f"{cls.__name__}.{name}: {kind.__name__} declares no dependency")
            if getattr(kind.finalize, "__isabstractmethod__", False):
                raise DeclarationError(f"{cls.__name__}.{name}: {kind.__name__} has no finalize()")
        parameters.update(own)
        given = vars(cls).get(MAPPING, {})
        if not isinstance(given, Mapping):
            raise DeclarationError(f"{cls.__name__}: {MAPPING} must be a dict, given a {type(given).__name__}")
        fresh = {source: _as_targets(cls, source, value) for source, value in given.items() if value is not None}
        cls.parameters = parameters
        cls._mapping = {**_inherited(mapping, set(given), fresh, set(own), parameters), **fresh}
        cls.rules = _checked_rules(cls)

    _mapping: ClassVar[dict[str, tuple[str, ...]]] = {}

    def __init__(self, model: TransformerModel) -> None:
        self.inference_model = model
        self._finalized: set[str] = set()
        for name, kind in self.parameters.items():
            setattr(self, name, kind(model, self, name))

    # -- what it is made of

    @property
    def n_params(self) -> int:
        return len(self.parameters)

    @property
    def annotation_attrs(self) -> tuple[str, ...]:
        """The names of its parameters, in order of declaration."""
        return tuple(self.parameters)

    @property
    def mapping_params(self) -> dict[str, tuple[str, ...]]:
        """The mapping with all that is inherited: source -> ``parameter.dependency``, ..."""
        return dict(self._mapping)

    @property
    def is_populated(self) -> bool:
        """Whether every parameter is finalised."""
        return len(self._finalized) == len(self.parameters)

    @property
    def is_initialized(self) -> bool:
        """Whether every parameter is finalised and lies on the model's device."""
        device = self.inference_model.device
        return self.is_populated and all(p is None or p.device.type == device.type for p in self.finalized().values())

    def finalized(self) -> dict[str, InferenceParameter | None]:
        """The finalised parameters by name."""
        return {name: getattr(self, name) for name in self.parameters if name in self._finalized}

    # -- filling it

    def resolve(self, name: str) -> tuple[Target, ...]:
        """The targets of a source name, () for one that no rule knows.

        Raises:
            ValueError: several wildcard rules match it.
        """
        matches = []
        for rule in self.rules:
            if rule.source == name:
                return rule.targets
            found = rule.pattern.fullmatch(name)
            if found:
                index = int(found.group(1)) if rule.is_list else None
                matches.append((rule.source, tuple(target._replace(index=index) for target in rule.targets)))
        if len(matches) > 1:
            raise ValueError(
                f"{type(self).__name__}: {name!r} is matched by {len(matches)} rules: {', '.join(s for s, _ in matches)}"
            )
        return matches[0][1] if matches else ()

    def set_dependency(self, name: str, value: Any) -> None:
        """Gives a source tensor to all that it feeds; ``value`` is a tensor or a lazy file tensor.

        Raises:
            ValueError: no rule knows the name (the nearest are named), or it was set before.
        """
        targets = self.resolve(name)
        if not targets:
            raise ValueError(f"{type(self).__name__} has no rule for {name!r}{self.near(name)}")
        for target in targets:
            parameter = getattr(self, target.parameter)
            if not isinstance(parameter, ParameterBase):
                raise ValueError(f"{type(self).__name__}.{target.parameter} is finalised: {name!r} came too late or twice")
            if target.index is None:
                parameter.set(target.dependency, value)
            else:
                parameter.values[target.dependency][target.index] = value

    def near(self, name: str) -> str:
        """The source names that are most like ``name``, as the end of an error message."""
        close = get_close_matches(name, list(self._mapping), n=3, cutoff=0.4)
        return f"; nearest: {', '.join(close)}" if close else f"; known: {', '.join(self._mapping)}"

    def direct_injection(self, name: str, value: InferenceParameter | None) -> None:
        """Puts a finished parameter in place, as when a serialised checkpoint is loaded.

        Raises:
            ValueError: no such parameter, or one that is finalised already.
        """
        if name not in self.parameters:
            raise ValueError(f"{type(self).__name__} has no parameter {name!r}; it has {', '.join(self.parameters)}")
        if name in self._finalized:
            raise ValueError(f"{type(self).__name__}.{name} is finalised already")
        self.finalization_callback(name, value)

    def finalization_callback(self, name: str, value: InferenceParameter | None) -> None:
        """Called by a parameter when it is finalised: the result takes its place."""
        setattr(self, name, value)
        self._finalized.add(name)

    def settle(self, arriving: Iterable[Target]) -> None:
        """Settles the dependencies that will not come, given the targets of all that will."""
        by_parameter: dict[str, set[str]] = {}
        for target in arriving:
            by_parameter.setdefault(target.parameter, set()).add(target.dependency)
        for name in self.parameters:
            parameter = getattr(self, name)
            if isinstance(parameter, ParameterBase):
                parameter.settle(frozenset(by_parameter.get(name, ())))

    def sources_of(self, parameter: str, dependency: str) -> list[str]:
        """The source names that feed a dependency."""
        wanted = Target(parameter, dependency)
        return [rule.source for rule in self.rules if wanted in rule.targets]

    def missing(self) -> list[str]:
        """What has not come: source names where a rule gives one, else ``parameter.dependency``."""
        found = []
        for name in self.parameters:
            parameter = getattr(self, name)
            if isinstance(parameter, ParameterBase):
                for entry in parameter.missing():
                    dependency, _, index = entry.partition("[")
                    sources = self.sources_of(name, dependency)
                    shown = sources[0].replace("*", index.rstrip("]")) if sources else f"{name}.{entry}"
                    found.append(shown)
        return found


def _as_targets(cls: type, source: str, value: Any) -> tuple[str, ...]:
    targets = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, (list, tuple)) else None
    if not targets or not all(isinstance(target, str) for target in targets):
        raise DeclarationError(
            f"{cls.__name__}: rule {source!r} maps to {value!r}; expected 'parameter.dependency', a list of them, or None"
        )
    return targets


def _inherited(
    mapping: dict[str, tuple[str, ...]],
    remapped: set[str],
    fresh: dict[str, tuple[str, ...]],
    redeclared: set[str],
    parameters: dict[str, type[ParameterBase]],
) -> dict[str, tuple[str, ...]]:
    """The rules of the bases that still stand: not mapped anew, and not feeding what the child declares otherwise."""
    claimed = {target for targets in fresh.values() for target in targets}

    def stands(target: str) -> bool:
        name, _, dependency = target.partition(".")
        return target not in claimed and not (
            name in redeclared and dependency not in parameters[name].dependencies
        )

    kept = {source: tuple(filter(stands, targets)) for source, targets in mapping.items() if source not in remapped}
    return {source: targets for source, targets in kept.items() if targets}


def _checked_rules(cls: type[LayerContainer]) -> tuple[Rule, ...]:
    claimed: dict[tuple[str, str], str] = {}
    rules = []
    for source, texts in cls._mapping.items():
        where = f"{cls.__name__}: rule {source!r}"
        targets = []
        for text in texts:
            name, dot, dependency = text.partition(".")
            if not dot or "." in dependency or not name or not dependency:
                raise DeclarationError(f"{where}: target {text!r} is not of the form 'parameter.dependency'")
            if name not in cls.parameters:
                raise DeclarationError(
                    f"{where}: no parameter {name!r} in this container; it has {', '.join(cls.parameters) or 'none'}"
                )
            kind = cls.parameters[name]
            if dependency not in kind.dependencies:
                raise DeclarationError(
                    f"{where}: {name!r} is a {kind.__name__}, which has no dependency {dependency!r}; "
                    f"it has {', '.join(kind.dependencies)}"
                )
            if (name, dependency) in claimed:
                raise DeclarationError(
                    f"{where}: {text!r} is already fed by rule {claimed[name, dependency]!r}; a dependency has one source"
                )
            claimed[name, dependency] = source
            targets.append(Target(name, dependency))
        lists = [cls.parameters[t.parameter].dependencies[t.dependency].list_type is not None for t in targets]
        if any(lists) and not all(lists):
            raise DeclarationError(f"{where}: mixes list and tensor dependencies ({', '.join(texts)}); use two rules")
        if all(lists) and source.count("*") != 1:
            raise DeclarationError(
                f"{where}: feeds a list, so it needs exactly one `*` for the index; it has {source.count('*')}"
            )
        wild = r"(\d+)" if all(lists) else ".*"
        pattern = re.compile(wild.join(re.escape(part) for part in source.split("*")))
        rules.append(Rule(source, tuple(targets), pattern, all(lists)))
    if rules:
        unmapped = [
            f"{name}.{dependency}"
            for name, kind in cls.parameters.items()
            for dependency in kind.dependencies
            if (name, dependency) not in claimed
        ]
        if unmapped:
            raise DeclarationError(f"{cls.__name__}: no rule of {MAPPING} feeds {', '.join(unmapped)}")
    return tuple(rules)
