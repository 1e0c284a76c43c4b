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
    """Where a checkpoint tensor goes: ``parameter.dependency``, and the place in a list."""

    parameter: str
    dependency: str
    place: int | None = None

    def __str__(self) -> str:
        return f"{self.parameter}.{self.dependency}" + ("" if self.place is None else f"[{self.place}]")


@dataclass(frozen=True)
class Rule:
    """One line of a PARAM_MAPPING: a source name, in which ``*`` stands for anything, and what it feeds."""

    source: str
    targets: tuple[Target, ...]
    pattern: re.Pattern[str]
    is_list: bool

    def match(self, name: str) -> tuple[Target, ...]:
        """What a source name feeds by this rule; () where the rule is for other names."""
        found = self.pattern.fullmatch(name)
        if found is None:
            return ()
        place = int(found.group(1)) if self.is_list else None
        return tuple(target._replace(place=place) for target in self.targets)


class LayerContainer:
    """The parameters of a layer (or of all that is in no layer), declared by annotation.

    ``PARAM_MAPPING`` maps source names, relative to the layer, to ``"parameter.dependency"`` or several of them. A
    ``*`` matches anything in a name; for lists there is exactly one, the index. Everything is checked when the class
    is defined. A subclass adds to what its bases declare and wins over them; mapping a source to None takes it out.
    Without any mapping the dependencies are set by hand: ``container.qkv.q_params = tensor``.

    Raises:
        DeclarationError: at class definition, naming the class, the rule and the valid choices.
    """

    PARAM_MAPPING: ClassVar[Mapping[str, Any]] = {}
    parameters: ClassVar[dict[str, type[ParameterBase]]] = {}
    rules: ClassVar[tuple[Rule, ...]] = ()

    _own_parameters: ClassVar[dict[str, type[ParameterBase]]] = {}
    _own_mapping: ClassVar[dict[str, tuple[str, ...]]] = {}
    _mapping: ClassVar[dict[str, tuple[str, ...]]] = {}
    _exact: ClassVar[dict[str, Rule]] = {}
    _wild: ClassVar[tuple[Rule, ...]] = ()

    inference_model: TransformerModel

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls._own_parameters = _declared_parameters(cls, resolved_annotations(cls, sys._getframe(1)))
        cls._own_mapping = _declared_mapping(cls)
        cls.parameters, cls._mapping = _inherited(cls)
        cls.rules = _checked_rules(cls)
        cls._exact = {rule.source: rule for rule in cls.rules if "*" not in rule.source}
        cls._wild = tuple(rule for rule in cls.rules if "*" in rule.source)

    def __init__(self, model: TransformerModel) -> None:
        self.inference_model = model
        self._finalized: set[str] = set()
        for name, kind in self.parameters.items():
            setattr(self, name, kind(model, self, name))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or hasattr(type(self), name):
            # A property of the class that failed: its own error says more.
            return object.__getattribute__(self, name)
        raise AttributeError(
            f"{type(self).__name__} has no parameter {name!r}; it has {', '.join(self.parameters) or 'none'}"
        )

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

    def take_finalized(self) -> dict[str, InferenceParameter]:
        """The parameters that were finalised since the last call; the container keeps nothing of them."""
        taken = {name: value for name, value in self.finalized().items() if value is not None}
        for name in taken:
            setattr(self, name, None)
        return taken

    # -- filling it

    def resolve(self, name: str) -> tuple[Target, ...]:
        """The targets of a source name, () for one that no rule knows. A rule without ``*`` goes before those with.

        Raises:
            ValueError: several wildcard rules match it.
        """
        exact = self._exact.get(name)
        if exact is not None:
            return exact.targets
        matches = {rule.source: targets for rule in self._wild if (targets := rule.match(name))}
        if len(matches) > 1:
            raise ValueError(
                f"{type(self).__name__}: {name!r} is matched by {len(matches)} rules: {', '.join(matches)}; "
                "let one of them match"
            )
        return next(iter(matches.values()), ())

    def set_dependency(self, name: str, value: Any) -> None:
        """Routes a checkpoint tensor (or lazy file tensor) to what it feeds.

        Raises:
            ValueError: no rule knows the name (the nearest are named), or it was set before.
        """
        targets = self.resolve(name)
        if not targets:
            raise ValueError(f"{type(self).__name__} has no rule for {name!r}{self.near(name)}")
        for target in targets:
            parameter = getattr(self, target.parameter)
            if not isinstance(parameter, ParameterBase):
                raise ValueError(
                    f"{type(self).__name__}.{target.parameter} is finalised: {name!r} came too late or twice"
                )
            if target.place is None:
                parameter.set(target.dependency, value)
            else:
                parameter.values[target.dependency][target.place] = value

    def near(self, name: str) -> str:
        """The source names that are most like ``name``, as the end of an error message."""
        close = get_close_matches(name, list(self._mapping), n=3, cutoff=0.4)
        return f"; nearest: {', '.join(close)}" if close else f"; known: {', '.join(self._mapping) or 'none'}"

    def direct_injection(self, name: str, value: InferenceParameter | None) -> None:
        """Puts a finished parameter in place, as when a serialised checkpoint is loaded.

        Raises:
            ValueError: no such parameter, or one that is finalised already. TypeError: a value of another kind.
        """
        if value is not None and not isinstance(value, InferenceParameter):
            raise TypeError(f"{type(self).__name__}.{name} takes an InferenceParameter or None, given {type(value)!r}")
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

    def source_of(self, target: Target) -> str:
        """The source name that feeds a target; ``parameter.dependency`` where no rule does."""
        tensor = target._replace(place=None)
        source = next((rule.source for rule in self.rules if tensor in rule.targets), str(target))
        return source if target.place is None else source.replace("*", str(target.place))

    def missing(self) -> list[str]:
        """The source names of what has not come."""
        parameters = {name: getattr(self, name) for name in self.parameters}
        return [
            self.source_of(Target(name, dependency, place))
            for name, parameter in parameters.items()
            if isinstance(parameter, ParameterBase)
            for dependency, places in parameter.missing().items()
            for place in places
        ]


def with_biases(names: Mapping[str, str]) -> dict[str, str]:
    """Rules for modules that are served with weight and bias: ``{"ln_1": "attn_norm"}`` makes ``ln_1.weight`` feed
    ``attn_norm.params`` and ``ln_1.bias`` feed ``attn_norm_bias.params``."""
    weights = {f"{module}.weight": f"{parameter}.params" for module, parameter in names.items()}
    return weights | {f"{module}.bias": f"{parameter}_bias.params" for module, parameter in names.items()}


def _declared_parameters(cls: type[LayerContainer], annotations: Mapping[str, Any]) -> dict[str, type[ParameterBase]]:
    """The parameters that a class body annotates, checked."""
    if MAPPING in annotations and MAPPING not in vars(cls):
        raise DeclarationError(f"{cls.__name__}: {MAPPING} is annotated but not assigned; write `{MAPPING} = {{...}}`")
    found = {name: k for name, k in annotations.items() if isinstance(k, type) and issubclass(k, ParameterBase)}
    for name, kind in found.items():
        where = f"{cls.__name__}.{name}"
        if hasattr(LayerContainer, name) or name in LayerContainer.__annotations__:
            raise DeclarationError(f"{where}: every container has something called {name!r}; choose another name")
        if not kind.dependencies:
            raise DeclarationError(
                f"{where}: {kind.__name__} declares no dependency; annotate one, `params: torch.Tensor`"
            )
        if getattr(kind.finalize, "__isabstractmethod__", False):
            raise DeclarationError(f"{where}: {kind.__name__} has no finalize()")
    return found


def _declared_mapping(cls: type[LayerContainer]) -> dict[str, tuple[str, ...]]:
    """The rules that a class body states, as source -> targets; () takes an inherited rule out."""
    given = vars(cls).get(MAPPING, {})
    if not isinstance(given, Mapping):
        raise DeclarationError(f"{cls.__name__}: {MAPPING} must be a dict, given a {type(given).__name__}")
    known = {source for base in cls.__mro__[1:] for source in vars(base).get("_own_mapping", ())}
    mapping: dict[str, tuple[str, ...]] = {}
    for source, value in given.items():
        where = f"{cls.__name__}: rule {source!r}"
        if not isinstance(source, str):
            raise DeclarationError(f"{where}: a source name is a string, given a {type(source).__name__}")
        if value is None:
            if source not in known:
                raise DeclarationError(
                    f"{where}: takes out a rule that no base has; they have {_listed(sorted(known))}"
                )
            mapping[source] = ()
            continue
        targets = (value,) if isinstance(value, str) else value
        if not isinstance(targets, (list, tuple)) or not targets or not all(isinstance(t, str) for t in targets):
            raise DeclarationError(
                f"{where}: maps to {value!r}; expected 'parameter.dependency', a list of them, or None"
            )
        mapping[source] = tuple(targets)
    return mapping


def _inherited(cls: type[LayerContainer]) -> tuple[dict[str, type[ParameterBase]], dict[str, tuple[str, ...]]]:
    """Parameters and rules of a class and its bases, from the farthest base on; whoever comes later wins.

    An older rule no longer feeds what a later one feeds, nor what a redeclared parameter has no dependency for.
    """
    parameters: dict[str, type[ParameterBase]] = {}
    mapping: dict[str, tuple[str, ...]] = {}
    for base in reversed(cls.__mro__):
        own: dict[str, type[ParameterBase]] = vars(base).get("_own_parameters", {})
        fresh: dict[str, tuple[str, ...]] = vars(base).get("_own_mapping", {})
        parameters.update(own)
        gone = {target for targets in fresh.values() for target in targets}
        for targets in mapping.values():
            split = [(target, *target.partition(".")[::2]) for target in targets]
            gone.update(t for t, name, dependency in split if name in own and dependency not in own[name].dependencies)
        mapping = {source: tuple(t for t in targets if t not in gone) for source, targets in mapping.items()}
        mapping = {source: targets for source, targets in {**mapping, **fresh}.items() if targets}
    return parameters, mapping


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names) or "none"


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
                    f"{where}: no parameter {name!r} in this container; it has {_listed(cls.parameters)}"
                )
            kind = cls.parameters[name]
            if dependency not in kind.dependencies:
                raise DeclarationError(
                    f"{where}: {name!r} is a {kind.__name__}, which has no dependency {dependency!r}; "
                    f"it has {', '.join(kind.dependencies)}"
                )
            if (name, dependency) in claimed:
                raise DeclarationError(
                    f"{where}: {text!r} is fed by rule {claimed[name, dependency]!r} already; keep one of the two"
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
