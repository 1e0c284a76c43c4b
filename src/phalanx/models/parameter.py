"""Parameters: how the tensors of a checkpoint become the tensor that the engine wants.

A Parameter declares its *dependencies* (checkpoint tensors) by annotation and ``finalize()``, which makes the tensor to
serve. When the last dependency arrives, ``finalize`` runs by itself, its result takes the Parameter's place in the
container, and the sources are let go.
"""

from __future__ import annotations

import inspect
import sys
import types
import typing
from abc import ABC, abstractmethod
from collections import ChainMap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, Union

from torch import Tensor

from phalanx.weights import WeightError

if TYPE_CHECKING:
    import torch

    from phalanx.models.base import TransformerModel
    from phalanx.models.container import LayerContainer


class DeclarationError(TypeError):
    """A Parameter, LayerContainer or Policy class that is declared wrongly; raised when the class is defined."""


@dataclass(eq=False)
class InferenceParameter:
    """What a finalised Parameter is: a tensor in the layout of the module that uses it, and named auxiliary tensors.

    Attributes:
        data: the tensor.
        layout: name of the layout of ``data`` ("plain" where it is the logical tensor, cut for this rank).
        shape: the logical shape of this rank's part, whatever the layout.
        aux: further tensors that belong to it (scales and the like).
    """

    data: Tensor
    layout: str = "plain"
    shape: tuple[int, ...] = ()
    aux: Mapping[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.shape = tuple(self.shape) or tuple(self.data.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.data.dtype

    @property
    def device(self) -> torch.device:
        return self.data.device

    @property
    def nbytes(self) -> int:
        """Bytes of all its tensors."""
        return self.data.nbytes + sum(tensor.nbytes for tensor in self.aux.values())


class ParametrizedList:
    """A run of checkpoint tensors that count as one dependency, set by index (one per expert, say).

    A subclass names in ``count_attr`` the attribute of the model that holds its length; ``ParamList(attr)`` makes one.
    """

    count_attr: ClassVar[str]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if not isinstance(getattr(cls, "count_attr", None), str):
            raise DeclarationError(
                f"{cls.__name__}: a ParametrizedList needs `count_attr`, the model attribute that holds its length"
            )

    def __init__(self, owner: ParameterBase, name: str, length: int) -> None:
        self._owner = owner
        self._name = name
        self._values: list[Any] = [None] * length
        self._missing = length

    def __setitem__(self, index: int, value: Any) -> None:
        label = f"{self._owner.label}.{self._name}"
        if not 0 <= index < len(self._values):
            raise IndexError(
                f"{label}[{index}]: the list has {len(self._values)} entries (`{self.count_attr}`), from 0 on"
            )
        if value is None:
            raise ValueError(f"{label}[{index}] was given None: a list takes tensors")
        if self._values[index] is not None:
            raise ValueError(f"{label}[{index}] was set already: a tensor is set once")
        self._values[index] = value
        self._missing -= 1
        if not self._missing:
            self._owner.complete(self._name)

    def __getitem__(self, index: int) -> Any:
        return self._values[index]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    @property
    def missing(self) -> list[int]:
        """Indices that no tensor has come for."""
        return [index for index, value in enumerate(self._values) if value is None]


@cache
def ParamList(count_attr: str) -> type[ParametrizedList]:
    """The list type whose length is the model's attribute ``count_attr``."""
    return type(f"ParamList_{count_attr}", (ParametrizedList,), {"count_attr": count_attr})


class Dependency:
    """One declared dependency, as a descriptor: reading gives the tensor (or list), setting it counts it as come.

    Attributes:
        list_type: the ParametrizedList subclass, or None for a tensor.
        optional: a checkpoint may lack it.
    """

    def __init__(self, name: str, list_type: type[ParametrizedList] | None, optional: bool) -> None:
        self.name = name
        self.list_type = list_type
        self.optional = optional

    def __get__(self, owner: ParameterBase | None, kind: type) -> Any:
        if owner is None:
            return self
        if self.name not in owner.values:
            raise AttributeError(f"{owner.label}.{self.name} is not here: it has not come, or was let go by finalize()")
        return owner.values[self.name]

    def __set__(self, owner: ParameterBase, value: Any) -> None:
        if self.list_type is not None:
            raise ValueError(f"{owner.label}.{self.name} is a list: set its entries by index")
        owner.set(self.name, value)


class ParameterBase(ABC):
    """Base of all Parameters. Dependencies are the annotations ``torch.Tensor``, ``torch.Tensor | None`` (a checkpoint
    may lack it) and subclasses of ParametrizedList, of the class and of its bases; other annotations are left alone.

    Args:
        model: the model that it is made for; ``self.inference_model`` inside ``finalize``.
        container: the LayerContainer that it belongs to, None when it stands alone.
        name: its name there.

    Raises:
        DeclarationError: a list whose ``count_attr`` the model lacks; at class definition, an annotation that cannot be
            evaluated, a list that is optional, a dependency with the name of something that every Parameter has.
    """

    dependencies: ClassVar[dict[str, Dependency]] = {}
    _own_dependencies: ClassVar[dict[str, Dependency]] = {}

    inference_model: TransformerModel
    container: LayerContainer | None
    name: str
    values: dict[str, Any]
    result: InferenceParameter | None
    is_finalized: bool

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        own: dict[str, Dependency] = {}
        for name, annotation in resolved_annotations(cls, sys._getframe(1)).items():
            dependency = _dependency(cls, name, annotation)
            if dependency is not None:
                if name in ParameterBase.__annotations__ or hasattr(ParameterBase, name):
                    raise DeclarationError(
                        f"{cls.__name__}: a dependency cannot be called `{name}`, every Parameter has one"
                    )
                own[name] = dependency
                setattr(cls, name, dependency)
        cls._own_dependencies = own
        cls.dependencies = {}
        for base in reversed(cls.__mro__):
            cls.dependencies.update(vars(base).get("_own_dependencies", {}))

    def __init__(self, model: TransformerModel, container: LayerContainer | None = None, name: str = "") -> None:
        self.inference_model = model
        self.container = container
        self.name = name or type(self).__name__
        self.values = {}
        self.result = None
        self.is_finalized = False
        self._awaited = set(self.dependencies)
        for dependency in self.dependencies.values():
            if dependency.list_type is not None:
                length = self._length(dependency.name, dependency.list_type.count_attr)
                self.values[dependency.name] = dependency.list_type(self, dependency.name, length)

    @property
    def label(self) -> str:
        return f"{type(self.container).__name__}.{self.name}" if self.container is not None else self.name

    @abstractmethod
    def finalize(self) -> InferenceParameter | None:
        """The tensor to serve, from the dependencies (None for an optional one that the checkpoint lacks)."""

    def expected_shape(self, dependency: str, ndim: int) -> tuple[int, ...] | None:
        """The full shape that a source tensor of ``ndim`` dimensions must have, checked before anything is read.

        None leaves it unchecked. An impossible ``ndim`` may be answered with the shape expected instead.
        """
        return None

    def required(self, dependency: str) -> bool | None:
        """Whether this model has an optional dependency: True, it must come; False, it must not; None, either way."""
        return None

    def set(self, name: str, value: Any) -> None:
        """A dependency's tensor (or lazy file tensor) has come.

        Raises:
            ValueError: it came before, was settled as absent, is None, or is one that this model does not have.
        """
        if value is None:
            raise ValueError(f"{self.label}.{name} was given None: leave an absent dependency out")
        if name not in self._awaited:
            if self.values.get(name, self) is None:
                raise ValueError(f"{self.label}.{name} came too late: it was settled as absent, announce it in begin()")
            raise ValueError(f"{self.label}.{name} was set already: a tensor is set once")
        if self.required(name) is False:
            raise ValueError(f"{self.label}.{name} was given, but a trait of the model says that there is none")
        self.values[name] = value
        self.complete(name)

    def complete(self, name: str) -> None:
        """Counts a dependency as settled; the last one runs ``finalize``.

        Raises:
            WeightError: ``finalize`` found the tensors unusable. DeclarationError: it returned something else than an
                InferenceParameter or None.
        """
        self._awaited.discard(name)
        if self._awaited or self.is_finalized:
            return
        try:
            result = self.finalize()
        except ValueError as error:
            raise WeightError(f"{self.label}: {error}") from error
        if result is not None and not isinstance(result, InferenceParameter):
            raise DeclarationError(
                f"{type(self).__name__}.finalize() returned a {type(result).__name__}; expected what one of the "
                "model's transform_*_param methods returns (an InferenceParameter), or None"
            )
        self.is_finalized = True
        self.result = result
        self.values = {}
        if self.container is not None:
            self.container.finalization_callback(self.name, result)

    def settle(self, arriving: frozenset[str]) -> None:
        """Settles what will not come: optional dependencies outside ``arriving`` are None, empty lists complete.

        One that is optional for others but required by this model stays awaited.
        """
        for dependency in self.dependencies.values():
            name = dependency.name
            if name not in self._awaited:
                continue
            if dependency.list_type is not None:
                if len(self.values[name]) == 0:
                    self.complete(name)
            elif dependency.optional and name not in arriving and not self.required(name):
                self.values[name] = None
                self.complete(name)

    def missing(self) -> dict[str, list[int | None]]:
        """The dependencies that have not come, with the places that lack in a list; [None] for a tensor."""
        found: dict[str, list[int | None]] = {}
        for name in self.dependencies:
            if name in self._awaited:
                value = self.values.get(name)
                found[name] = list(value.missing) if isinstance(value, ParametrizedList) else [None]
        return found

    def _length(self, name: str, count_attr: str) -> int:
        length = getattr(self.inference_model, count_attr, None)
        if not isinstance(length, int):
            model = type(self.inference_model).__name__
            raise DeclarationError(
                f"{self.label}.{name}: its length is the model's attribute `{count_attr}`, which {model} "
                + ("lacks" if length is None else f"has as {length!r}, not as a whole number")
            )
        return length


def _dependency(cls: type, name: str, annotation: Any) -> Dependency | None:
    optional = False
    if typing.get_origin(annotation) in (Union, types.UnionType):
        members = [member for member in typing.get_args(annotation) if member is not type(None)]
        if len(members) != 1:
            return None
        annotation, optional = members[0], True
    if not isinstance(annotation, type):
        return None
    if issubclass(annotation, Tensor):
        return Dependency(name, None, optional)
    if issubclass(annotation, ParametrizedList):
        if optional:
            raise DeclarationError(
                f"{cls.__name__}.{name}: a list cannot be optional; let its length, `{annotation.count_attr}`, be 0"
            )
        return Dependency(name, annotation, False)
    return None


def resolved_annotations(cls: type, frame: types.FrameType | None) -> dict[str, Any]:
    """The annotations written in the body of ``cls``, strings evaluated where the class was written.

    ``ClassVar`` ones are left out.

    Args:
        frame: any frame at or inside the class statement.

    Raises:
        DeclarationError: a string that names something unknown there.
    """
    scope = ChainMap(dict(vars(cls)), *_enclosing_locals(cls, frame))
    found = {}
    for name, annotation in inspect.get_annotations(cls).items():
        if isinstance(annotation, str):
            if annotation.startswith(("ClassVar", "typing.ClassVar")):
                continue
            try:
                annotation = eval(annotation, vars(sys.modules[cls.__module__]), scope)
            except Exception as error:
                raise DeclarationError(
                    f"{cls.__name__}.{name}: annotation {annotation!r} cannot be evaluated: {error} (import it at run "
                    "time, not only for type checkers)"
                ) from None
        if ClassVar not in (annotation, typing.get_origin(annotation)):
            found[name] = annotation
    return found


def _enclosing_locals(cls: type, frame: types.FrameType | None) -> list[dict[str, Any]]:
    """The names of the functions and classes that a class statement stands in, the innermost first."""
    found = []
    outer = cls.__qualname__.rpartition(".")[0]
    while frame is not None and outer:
        scope = outer.removesuffix(".<locals>")
        if frame.f_globals.get("__name__") == cls.__module__ and frame.f_code.co_qualname == scope:
            found.append(frame.f_locals)
            outer = scope.rpartition(".")[0]
        frame = frame.f_back
    return found
