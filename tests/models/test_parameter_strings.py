"""Annotations that are strings, as `from __future__ import annotations` makes them: also in functions and classes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar, Optional, TypeAlias

import pytest
import torch
import torch as aliased

from phalanx.models import DeclarationError, InferenceParameter, LayerContainer, ParameterBase
from tests.models.kit import Experts, One, stub

if TYPE_CHECKING:
    from decimal import Decimal


class Nothing(ParameterBase):
    """For tests of declarations only."""

    def finalize(self) -> InferenceParameter | None:
        return None


class AtModuleLevel(Nothing):
    tensor: torch.Tensor
    renamed: aliased.Tensor
    optional: Optional[torch.Tensor]  # noqa: UP045 - the old spelling
    union: torch.Tensor | None
    many: Experts
    constant: ClassVar[torch.Tensor]
    number: int


def kinds(cls: type[ParameterBase]) -> dict[str, tuple[bool, bool]]:
    return {name: (d.list_type is not None, d.optional) for name, d in cls.dependencies.items()}


def test_at_module_level() -> None:
    assert kinds(AtModuleLevel) == {
        "tensor": (False, False),
        "renamed": (False, False),
        "optional": (False, True),
        "union": (False, True),
        "many": (True, False),
    }


def test_in_a_function() -> None:
    Local: TypeAlias = torch.Tensor

    class InFunction(Nothing):
        a: Local
        b: Local | None

    assert kinds(InFunction) == {"a": (False, False), "b": (False, True)}


def test_in_nested_functions_the_inner_name_wins() -> None:
    Local: TypeAlias = int  # noqa: F841 - shadowed below
    Outer: TypeAlias = torch.Tensor

    def inner() -> type[ParameterBase]:
        Local: TypeAlias = torch.Tensor

        class InInner(Nothing):
            a: Local
            b: Outer

        return InInner

    assert list(kinds(inner())) == ["a", "b"]


def local_names_are_the_callers(torch: object) -> type[ParameterBase]:
    """Calls a function whose own global `torch` is meant, not the one of this frame."""
    return module_level_maker()


def module_level_maker() -> type[ParameterBase]:
    class Made(Nothing):
        params: torch.Tensor

    return Made


def test_a_callers_names_are_no_scope() -> None:
    assert list(local_names_are_the_callers(torch=None).dependencies) == ["params"]


def test_in_a_class_body_and_in_containers() -> None:
    class Family:
        class Weight(One):
            pass

        class Layer(LayerContainer):
            weight: Weight  # type: ignore[name-defined] # noqa: F821 - Python itself would not see it either

            PARAM_MAPPING = {"w": "weight.params"}

    assert Family.Layer.parameters == {"weight": Family.Weight}


def test_a_class_in_a_function_through_a_base_of_ones_own() -> None:
    class Registered(Nothing):
        def __init_subclass__(cls) -> None:
            super().__init_subclass__()

    Local: TypeAlias = torch.Tensor

    class Leaf(Registered):
        params: Local

    assert list(Leaf.dependencies) == ["params"]


def unknown_name() -> None:
    class Wrong(Nothing):
        params: torch.Tensr  # type: ignore[name-defined]


def only_for_type_checkers() -> None:
    class Wrong(Nothing):
        amount: Decimal


def in_a_container() -> None:
    class Wrong(LayerContainer):
        qkv: NoSuchParameter  # type: ignore[name-defined] # noqa: F821


@pytest.mark.parametrize(
    ("define", "message"),
    [
        (unknown_name, r"Wrong\.params: annotation 'torch\.Tensr' cannot be evaluated: .*no attribute 'Tensr'"),
        (only_for_type_checkers, r"Wrong\.amount: annotation 'Decimal' .*import it at run time"),
        (in_a_container, r"Wrong\.qkv: annotation 'NoSuchParameter' cannot be evaluated: .*not defined"),
    ],
)
def test_a_string_that_names_nothing_is_refused(define: Callable[[], None], message: str) -> None:
    with pytest.raises(DeclarationError, match=message):
        define()


def test_it_works_when_filled() -> None:
    parameter = One(stub())
    parameter.params = torch.ones(2)
    assert parameter.is_finalized
