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
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, Union

from torch import Tensor

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
                f"{cls.__name__}: a ParametrizedList needs `count_attr`, the name of the model attribute with its length"
            )

    def __init__(self, owner: ParameterBase, name: str, length: int) -> None:
        self._owner = owner
        self._name = name
        self._values: list[Any] = [None] * length
        self._missing = length

    def __setitem__(self, index: int, value: Any) -> None:
        label = f"{self._owner.label}.{self._name}"
        if not 0 <= index < len(self._values):
            raise IndexError(f"{label}[{index}]: the list has {len(self._values)} entries ({self.count_attr})")
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
def ParamList(count_attr: str) -> type[ParametrizedList]:  # noqa: N802 - reads as the type that it makes
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
        return self if owner is None else owner.values[self.name]

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
        DeclarationError: a list whose ``count_attr`` the model lacks.
    """

    dependencies: ClassVar[dict[str, Dependency]] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        merged: dict[str, Dependency] = {}
        for base in reversed(cls.__mro__[1:]):
            merged.update(vars(base).get("dependencies", {}))
        for name, annotation in resolved_annotations(cls, sys._getframe(1)).items():
            dependency = _dependency(name, annotation)
            if dependency is not None:
                merged[name] = dependency
                setattr(cls, name, dependency)
        cls.dependencies = merged

    def __init__(self, model: TransformerModel, container: LayerContainer | None = None, name: str = "") -> None:
        self.inference_model = model
        self.container = container
        self.name = name or type(self).__name__
        self.values: dict[str, Any] = {}
        self.result: InferenceParameter | None = None
        self.is_finalized = False
        self._awaited = set(self.dependencies)
        for dependency in self.dependencies.values():
            if dependency.list_type is not None:
                self.values[dependency.name] = dependency.list_type(self, dependency.name, self._length(dependency))

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
            ValueError: it came before, or is None.
        """
        if value is None:
            raise ValueError(f"{self.label}.{name} was given None: leave an absent dependency out")
        if name not in self._awaited:
            raise ValueError(f"{self.label}.{name} was set already: a tensor is set once")
        self.values[name] = value
        self.complete(name)

    def complete(self, name: str) -> None:
        """Counts a dependency as settled; the last one runs ``finalize``."""
        self._awaited.discard(name)
        if self._awaited or self.is_finalized:
            return
        self.is_finalized = True
        result = self.finalize()
        if result is not None and not isinstance(result, InferenceParameter):
            raise DeclarationError(
                f"{type(self).__name__}.finalize() returned a {type(result).__name__}; expected what one of the "
                "model's transform_*_param methods returns (an InferenceParameter), or None"
            )
        self.result = result
        self.values = {}
        if self.container is not None:
            self.container.finalization_callback(self.name, result)

    def settle(self, arriving: frozenset[str]) -> None:
        """Settles what will not come: optional dependencies outside ``arriving`` are None, empty lists complete."""
        for dependency in self.dependencies.values():
            name = dependency.name
            if name not in self._awaited:
                continue
            if dependency.list_type is not None:
                if len(self.values[name]) == 0:
                    self.complete(name)
            elif dependency.optional and name not in arriving:
                self.values[name] = None
                self.complete(name)

    def missing(self) -> list[str]:
        """The dependencies that have not come, list entries with their index."""
        found = []
        for name in self.dependencies:
            if name in self._awaited:
                value = self.values.get(name)
                entries = value.missing if isinstance(value, ParametrizedList) else None
                found += [f"{name}[{index}]" for index in entries] if entries else [name]
        return found

    def _length(self, dependency: Dependency) -> int:
        list_type = dependency.list_type
        length = getattr(self.inference_model, list_type.count_attr, None) if list_type else None
        if not isinstance(length, int):
            raise DeclarationError(
                f"{self.label}.{dependency.name}: its length is the model attribute "
                f"`{list_type.count_attr if list_type else ''}`, which {type(self.inference_model).__name__} lacks"
            )
        return length


def _dependency(name: str, annotation: Any) -> Dependency | None:
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
            raise DeclarationError(f"dependency `{name}`: a list cannot be optional; let its length attribute be 0")
        return Dependency(name, annotation, False)
    return None


def resolved_annotations(cls: type, frame: types.FrameType | None) -> dict[str, Any]:
    """The annotations written in the body of ``cls``, strings evaluated where the class was written.

    ``ClassVar`` ones are left out.

    Raises:
        DeclarationError: a string that names something unknown there.
    """
    module = sys.modules.get(cls.__module__)
    scope = dict(vars(module)) if module else {}
    outer = frame
    # A class made inside a function sees that function's names; class statements may nest.
    while outer is not None and outer.f_globals is getattr(module, "__dict__", None):
        scope = {**scope, **outer.f_locals} if outer.f_code.co_name != "<module>" else scope
        outer = outer.f_back if outer.f_code.co_name != "<module>" else None
    found = {}
    for name, annotation in inspect.get_annotations(cls).items():
        if isinstance(annotation, str):
            if annotation.startswith(("ClassVar", "typing.ClassVar")):
                continue
            try:
                annotation = eval(annotation, scope)
            except Exception as error:
                raise DeclarationError(f"{cls.__name__}.{name}: annotation {annotation!r}: {error}") from None
        if typing.get_origin(annotation) is not ClassVar and annotation is not ClassVar:
            found[name] = annotation
    return found
