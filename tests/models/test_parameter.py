# No `from __future__ import annotations` here: these annotations are objects. The strings have a file of their own.
"""Parameters: what counts as a dependency, when finalize runs, and every way to set one wrongly."""

import gc
import weakref
from collections.abc import Callable
from typing import Any, ClassVar, Optional

import pytest
import torch

from phalanx.models import DeclarationError, InferenceParameter, ParameterBase, ParametrizedList, ParamList
from phalanx.weights import WeightError
from tests.models.kit import Experts, Maybe, One, Pair, Stack, numbered, stub, whole

A, B = numbered(2, 3), numbered(1, 3)


def served(parameter: ParameterBase) -> torch.Tensor:
    """What a finalised parameter became."""
    assert parameter.result is not None
    return parameter.result.data


class Kinds(ParameterBase):
    """Every annotation that is a dependency, and some that are not."""

    tensor: torch.Tensor
    subclass: torch.nn.Parameter
    optional: Optional[torch.Tensor]  # noqa: UP045 - the old spelling
    union: torch.Tensor | None
    many: ParamList("n_experts")  # type: ignore[valid-type]
    number: int
    either: int | str
    either_tensor: torch.Tensor | int | None
    constant: ClassVar[torch.Tensor]
    anything: Any
    words: list[str]

    def finalize(self) -> InferenceParameter | None:
        return None


def test_dependencies_are_tensors_and_lists() -> None:
    found = {name: (d.list_type is not None, d.optional) for name, d in Kinds.dependencies.items()}
    assert found == {
        "tensor": (False, False),
        "subclass": (False, False),
        "optional": (False, True),
        "union": (False, True),
        "many": (True, False),
    }


def test_other_annotations_are_left_alone() -> None:
    class WithNumber(One):
        factor: int
        label: ClassVar[str] = "x"

        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.factor = 3

    parameter = WithNumber(stub())
    assert parameter.factor == 3 and WithNumber.label == "x" and list(WithNumber.dependencies) == ["params"]


def test_inheritance_adds_up() -> None:
    class Third(Pair):
        third: torch.Tensor

        def finalize(self) -> InferenceParameter | None:
            return whole(torch.cat((self.first, self.second, self.third)))

    class Same(Third):
        pass

    for kind in (Third, Same):
        assert list(kind.dependencies) == ["first", "second", "third"]
        parameter = kind(stub())
        for name in ("third", "first", "second"):
            assert not parameter.is_finalized
            parameter.set(name, A)
        assert served(parameter).shape == (6, 3)
    assert list(Pair.dependencies) == ["first", "second"]


def test_in_a_diamond_the_nearer_class_wins() -> None:
    class Base(ParameterBase):
        params: torch.Tensor

        def finalize(self) -> InferenceParameter | None:
            return None

    class Left(Base):
        left: torch.Tensor

    class Right(Base):
        params: torch.Tensor | None  # type: ignore[assignment]

    class Both(Left, Right):
        pass

    assert {name: d.optional for name, d in Both.dependencies.items()} == {"params": True, "left": False}


@pytest.mark.parametrize("order", [("first", "second"), ("second", "first")])
def test_finalize_runs_at_the_last_dependency(order: tuple[str, str]) -> None:
    parameter = Pair(stub())
    values = {"first": A, "second": B}
    parameter.set(order[0], values[order[0]])
    assert parameter.result is None and parameter.missing() == {order[1]: [None]}
    setattr(parameter, order[1], values[order[1]])  # attribute or set(), both count
    assert parameter.is_finalized and parameter.missing() == {}
    assert torch.equal(served(parameter), torch.cat((A, B)))


def test_a_list_counts_as_one_dependency() -> None:
    class Mixed(Stack):
        gate: torch.Tensor

    parameter = Mixed(stub(n_experts=3))
    for index in (2, 0):
        parameter.experts[index] = A
    assert parameter.missing() == {"experts": [1], "gate": [None]}
    parameter.gate = B
    assert not parameter.is_finalized
    parameter.experts[1] = A
    assert served(parameter).shape == (3, 2, 3)


def test_a_list_has_a_length_items_and_an_iterator() -> None:
    values: Any = Stack(stub(n_experts=2)).experts
    values[1] = A
    assert isinstance(values, ParametrizedList) and len(values) == 2
    assert values[0] is None and values[1] is A and list(values) == [None, A] and values.missing == [0]


def test_optional_dependencies_are_settled_when_they_will_not_come() -> None:
    class Biased(One):
        bias: torch.Tensor | None

        def finalize(self) -> InferenceParameter | None:
            return whole(self.params if self.bias is None else self.params + self.bias)

    late, early, announced = Biased(stub()), Biased(stub()), Biased(stub())
    late.settle(frozenset({"params"}))
    late.params = A
    early.params = A
    early.settle(frozenset({"params"}))
    announced.settle(frozenset({"params", "bias"}))
    announced.params = A
    assert not announced.is_finalized
    announced.bias = torch.ones(3)
    assert [float(served(parameter)[0, 0]) for parameter in (late, early, announced)] == [0.0, 0.0, 1.0]


def test_all_optional_and_all_absent_is_none() -> None:
    parameter = Maybe(stub())
    parameter.settle(frozenset())
    assert parameter.is_finalized and parameter.result is None


def test_an_empty_list_settles() -> None:
    parameter = Stack(stub(n_experts=0))
    assert not parameter.is_finalized
    parameter.settle(frozenset())
    assert served(parameter).numel() == 0


def test_an_optional_one_that_the_model_requires_stays_awaited() -> None:
    parameter = Maybe(stub(has_bias=True))
    parameter.settle(frozenset())
    assert parameter.missing() == {"params": [None]}


def set_twice() -> None:
    parameter = Pair(stub())
    parameter.first = A
    parameter.first = A


def set_after_finalize() -> None:
    parameter = One(stub())
    parameter.params = A
    parameter.params = A


def set_after_settling() -> None:
    class WithBias(One):
        bias: torch.Tensor | None

    parameter = WithBias(stub())
    parameter.settle(frozenset())
    parameter.bias = A


def set_what_the_model_lacks() -> None:
    Maybe(stub(has_bias=False)).params = A


def set_none() -> None:
    One(stub()).set("params", None)


def set_list_itself() -> None:
    setattr(Stack(stub(n_experts=1)), "experts", A)  # noqa: B010 - it has another type


def set_entry(index: int, value: Any = A, count: int = 2, times: int = 1) -> Callable[[], None]:
    def act() -> None:
        experts: Any = Stack(stub(n_experts=count)).experts
        for _ in range(times):
            experts[index] = value

    return act


def read_before_it_came() -> None:
    _ = One(stub()).params


def return_a_tensor() -> None:
    class Bare(One):
        def finalize(self) -> Any:
            return self.params

    Bare(stub()).params = A


def fail_in_finalize() -> None:
    class Fussy(One):
        def finalize(self) -> InferenceParameter | None:
            raise ValueError("too wide")

    Fussy(stub(), None, "qkv").params = A


def length_is_absent() -> None:
    Stack(stub())


def length_is_no_number() -> None:
    Stack(stub(n_experts="two"))


MISUSE: list[tuple[Callable[[], None], type[Exception], str]] = [
    (set_twice, ValueError, r"Pair\.first was set already: a tensor is set once"),
    (set_after_finalize, ValueError, r"One\.params was set already"),
    (set_after_settling, ValueError, r"WithBias\.bias came too late: it was settled as absent"),
    (
        set_what_the_model_lacks,
        ValueError,
        r"Maybe\.params was given, but a trait of the model says that there is none",
    ),
    (set_none, ValueError, r"One\.params was given None: leave an absent dependency out"),
    (set_list_itself, ValueError, r"Stack\.experts is a list: set its entries by index"),
    (set_entry(0, times=2), ValueError, r"Stack\.experts\[0\] was set already"),
    (set_entry(2), IndexError, r"Stack\.experts\[2\]: the list has 2 entries \(`n_experts`\)"),
    (set_entry(-1), IndexError, r"Stack\.experts\[-1\]: the list has 2 entries"),
    (set_entry(0, count=0), IndexError, r"Stack\.experts\[0\]: the list has 0 entries"),
    (set_entry(0, value=None), ValueError, r"Stack\.experts\[0\] was given None"),
    (read_before_it_came, AttributeError, r"One\.params is not here: it has not come"),
    (return_a_tensor, DeclarationError, r"Bare\.finalize\(\) returned a Tensor; expected what one of the model's"),
    (fail_in_finalize, WeightError, r"^qkv: too wide$"),
    (length_is_absent, DeclarationError, r"Stack\.experts: its length is .* `n_experts`, which SimpleNamespace lacks"),
    (length_is_no_number, DeclarationError, r"has as 'two', not as a whole number"),
]


@pytest.mark.parametrize(("act", "kind", "message"), MISUSE, ids=[f"{i}-{m[1].__name__}" for i, m in enumerate(MISUSE)])
def test_misuse_is_named(act: Callable[[], None], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        act()


def list_without_count() -> None:
    class Nameless(ParametrizedList):
        pass


def optional_list() -> None:
    class Wrong(ParameterBase):
        many: Experts | None


def taken_name() -> None:
    class Wrong(ParameterBase):
        values: torch.Tensor  # type: ignore[assignment]


def taken_method() -> None:
    class Wrong(ParameterBase):
        settle: torch.Tensor  # type: ignore[assignment]


def no_finalize() -> None:
    class Wrong(ParameterBase):
        params: torch.Tensor

    Wrong(stub())  # type: ignore[abstract]


WRONG_CLASSES: list[tuple[Callable[[], None], str]] = [
    (list_without_count, "Nameless: a ParametrizedList needs `count_attr`"),
    (optional_list, r"Wrong\.many: a list cannot be optional; let its length, `n_experts`, be 0"),
    (taken_name, "Wrong: a dependency cannot be called `values`"),
    (taken_method, "Wrong: a dependency cannot be called `settle`"),
    (no_finalize, "abstract class Wrong .*finalize"),
]


@pytest.mark.parametrize(("define", "message"), WRONG_CLASSES, ids=[d.__name__ for d, _ in WRONG_CLASSES])
def test_a_wrong_class_is_refused(define: Callable[[], None], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        define()


def test_the_sources_are_let_go() -> None:
    parameter = Pair(stub())
    sources = [torch.ones(2, 3), torch.ones(1, 3)]
    gone = [weakref.ref(source) for source in sources]
    parameter.first, parameter.second = sources
    sources.clear()
    gc.collect()
    assert parameter.is_finalized and all(ref() is None for ref in gone)


def test_param_lists_of_one_length_are_one_type() -> None:
    made = ParamList("n_experts")
    assert made is ParamList("n_experts") and made is not ParamList("n_other")
    assert made.count_attr == "n_experts" and issubclass(made, ParametrizedList)


def test_an_inference_parameter_knows_its_shape_and_bytes() -> None:
    served = InferenceParameter(A, "packed", (4, 5), {"scales": B})
    assert served.shape == (4, 5) and served.nbytes == A.nbytes + B.nbytes
    assert (whole(A).shape, whole(A).dtype, whole(A).device.type) == ((2, 3), torch.float32, "cpu")
