"""LayerContainer: every fault of a declaration, inheritance, and how source names find their way."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import pytest
import torch

from phalanx.models import DeclarationError, LayerContainer, ParameterBase
from tests.models.kit import Experts, Maybe, One, Pair, Stack, numbered, stub, whole

A, B = numbered(2, 3), numbered(1, 3)


class Base(LayerContainer):
    norm: One
    qkv: Pair

    PARAM_MAPPING = {"norm.weight": "norm.params", "q": "qkv.first", "k": "qkv.second"}


def declare(
    mapping: Any, kinds: Mapping[str, Any] | None = None, base: type[LayerContainer] = LayerContainer
) -> type[LayerContainer]:
    """A container called Wrong."""
    return type("Wrong", (base,), {"PARAM_MAPPING": mapping, "__annotations__": dict(kinds or {})})


class MixedDependencies(Stack):
    """A list and a tensor in one parameter."""

    gate: torch.Tensor


GOOD = {"w": "one.params", "a": "pair.first", "b": "pair.second"}
PARTS: dict[str, type[ParameterBase]] = {"one": One, "pair": Pair}
FAULTS: dict[str, tuple[Callable[[], object], str]] = {
    "no dot": (lambda: declare({**GOOD, "w": "one"}, PARTS), "rule 'w': target 'one' is not of the form"),
    "two dots": (
        lambda: declare({**GOOD, "w": "one.params.x"}, PARTS),
        "rule 'w': target 'one.params.x' is not",
    ),
    "no such parameter": (
        lambda: declare({**GOOD, "w": "uno.params"}, PARTS),
        "rule 'w': no parameter 'uno' in this container; it has one, pair",
    ),
    "no such dependency": (
        lambda: declare({**GOOD, "a": "pair.frist"}, PARTS),
        "rule 'a': 'pair' is a Pair, which has no dependency 'frist'; it has first, second",
    ),
    "fed by two rules": (
        lambda: declare({**GOOD, "c": "pair.first"}, PARTS),
        "rule 'c': 'pair.first' is fed by rule 'a' already",
    ),
    "fed twice by one rule": (
        lambda: declare({**GOOD, "a": ["pair.first", "pair.first"]}, PARTS),
        "rule 'a': 'pair.first' is fed by rule 'a' already",
    ),
    "left unmapped": (
        lambda: declare({"w": "one.params", "a": "pair.first"}, PARTS),
        "no rule of PARAM_MAPPING feeds pair.second",
    ),
    "several left unmapped": (
        lambda: declare({"w": "one.params"}, PARTS),
        "no rule of PARAM_MAPPING feeds pair.first, pair.second",
    ),
    "list without wildcard": (
        lambda: declare({"e": "s.experts"}, {"s": Stack}),
        "rule 'e': feeds a list, so it needs exactly one `*` for the index; it has 0",
    ),
    "list with two wildcards": (lambda: declare({"e.*.*": "s.experts"}, {"s": Stack}), "rule 'e.*.*': .* it has 2"),
    "list and tensor mixed": (
        lambda: declare({"e.*": ["s.experts", "s.gate"]}, {"s": MixedDependencies}),
        "rule 'e.*': mixes list and tensor dependencies (s.experts, s.gate)",
    ),
    "no target": (lambda: declare({**GOOD, "x": []}, PARTS), "rule 'x': maps to []; expected 'parameter.dependency'"),
    "target is no string": (lambda: declare({**GOOD, "x": [1]}, PARTS), "rule 'x': maps to [1]; expected"),
    "target is a number": (lambda: declare({**GOOD, "x": 1}, PARTS), "rule 'x': maps to 1; expected"),
    "source is no string": (lambda: declare({**GOOD, 3: "one.params"}, PARTS), "rule 3: a source name is a string"),
    "no dict": (lambda: declare([("w", "one.params")], PARTS), "PARAM_MAPPING must be a dict, given a list"),
    "takes out what is not there": (
        lambda: declare({"nrom.weight": None}, base=Base),
        "rule 'nrom.weight': takes out a rule that no base has; they have k, norm.weight, q",
    ),
    "child leaves its own unmapped": (
        lambda: declare({}, {"more": One}, Base),
        "no rule of PARAM_MAPPING feeds more.params",
    ),
    "name of a method": (
        lambda: declare({}, {"resolve": One}),
        "Wrong.resolve: every container has something called 'resolve'",
    ),
    "name of an attribute": (lambda: declare({}, {"inference_model": One}), "something called 'inference_model'"),
    "only annotated": (
        lambda: type("Wrong", (LayerContainer,), {"__annotations__": {"one": One, "PARAM_MAPPING": {}}}),
        "PARAM_MAPPING is annotated but not assigned; write `PARAM_MAPPING = {...}`",
    ),
    "no dependency": (
        lambda: declare({}, {"empty": type("Empty", (ParameterBase,), {"finalize": lambda self: None})}),
        "Wrong.empty: Empty declares no dependency",
    ),
    "no finalize": (
        lambda: declare({}, {"half": type("Half", (ParameterBase,), {"__annotations__": {"params": torch.Tensor}})}),
        "Wrong.half: Half has no finalize()",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named_when_the_class_is_defined(fault: str) -> None:
    define, message = FAULTS[fault]
    with pytest.raises(DeclarationError) as caught:
        define()
    before, _, after = message.partition(" .* ")
    assert "Wrong" in str(caught.value) and before in str(caught.value) and after in str(caught.value)


def test_other_annotations_are_left_alone() -> None:
    class WithNumber(Base):
        count: int
        PARAM_MAPPING: ClassVar[dict[str, Any]] = {}

    assert list(WithNumber.parameters) == ["norm", "qkv"]


# -- inheritance


def test_a_child_adds_and_wins() -> None:
    class Other(One):
        pass

    class Child(Base):
        norm: Other
        mlp: One

        PARAM_MAPPING = {"mlp.weight": "mlp.params", "query": "qkv.first"}

    assert Child.parameters == {"norm": Other, "qkv": Pair, "mlp": One}
    assert Child(stub()).mapping_params == {
        "norm.weight": ("norm.params",),
        "k": ("qkv.second",),
        "mlp.weight": ("mlp.params",),
        "query": ("qkv.first",),
    }
    assert Base(stub()).mapping_params["q"] == ("qkv.first",) and Base.parameters["norm"] is One


def test_a_rule_of_the_same_source_is_replaced() -> None:
    class Swapped(Base):
        PARAM_MAPPING = {"q": "qkv.second", "k": "qkv.first"}

    assert Swapped(stub()).mapping_params == {
        "norm.weight": ("norm.params",),
        "q": ("qkv.second",),
        "k": ("qkv.first",),
    }


def test_none_takes_a_rule_out() -> None:
    class Renamed(Base):
        PARAM_MAPPING = {"norm.weight": None, "ln.weight": "norm.params"}

    assert Renamed(stub()).resolve("norm.weight") == () and Renamed(stub()).resolve("ln.weight")
    with pytest.raises(DeclarationError, match=r"feeds norm\.params"):
        declare({"norm.weight": None}, base=Base)


def test_three_levels_without_annotations_between() -> None:
    class Middle(Base):
        pass

    class Leaf(Middle):
        bias: Maybe
        PARAM_MAPPING = {"b": "bias.params"}

    class Same(Leaf):
        pass

    for kind in (Leaf, Same):
        assert kind(stub()).annotation_attrs == ("norm", "qkv", "bias") and kind(stub()).n_params == 3
        assert kind(stub()).resolve("norm.weight") and kind(stub()).resolve("b")


def test_multiple_inheritance() -> None:
    class Mlp(LayerContainer):
        mlp: One
        norm: Pair
        PARAM_MAPPING = {"mlp": "mlp.params", "n1": "norm.first", "n2": "norm.second"}

    class Both(Base, Mlp):  # type: ignore[misc] # norm has two types
        pass

    # As for attributes, the base named first wins.
    assert Both.parameters == {"norm": One, "qkv": Pair, "mlp": One}
    assert set(Both(stub()).mapping_params) == {"norm.weight", "q", "k", "mlp"}


def test_in_a_diamond_the_nearer_class_wins() -> None:
    class Left(Base):
        left: One
        PARAM_MAPPING = {"l": "left.params"}

    class Right(Base):
        norm: Maybe  # type: ignore[assignment]
        PARAM_MAPPING = {"q": None, "query": "qkv.first"}

    class Both(Left, Right):
        pass

    assert Both.parameters == {"norm": Maybe, "qkv": Pair, "left": One}
    assert set(Both(stub()).mapping_params) == {"norm.weight", "k", "l", "query"}


def test_a_redeclared_parameter_drops_the_rules_that_no_longer_fit() -> None:
    class Fused(Base):
        qkv: One  # type: ignore[assignment]
        PARAM_MAPPING = {"qkv": "qkv.params"}

    assert Fused(stub()).mapping_params == {"norm.weight": ("norm.params",), "qkv": ("qkv.params",)}
    with pytest.raises(DeclarationError, match=r"Wrong: no rule of PARAM_MAPPING feeds qkv\.params"):
        declare({}, {"qkv": One}, Base)


# -- names


class Wild(LayerContainer):
    norm: One
    gate: One
    stack: Stack
    other: Stack

    PARAM_MAPPING = {
        "*.norm.weight": "norm.params",
        "mlp.gate.w": "gate.params",
        "mlp.experts.*.w1.weight": ["stack.experts", "other.experts"],
    }


RESOLVED: dict[str, list[str]] = {
    "a.norm.weight": ["norm.params"],
    "a.b.norm.weight": ["norm.params"],
    "norm.weight": [],  # the star's dot is part of the rule
    "a.norm.weightx": [],  # whole names, not prefixes
    "a.normXweight": [],  # a dot is a dot
    "mlp.gate.w": ["gate.params"],
    "xmlp.gate.w": [],
    "mlp.gate.w_extra": [],
    "mlpXgate.w": [],
    "mlp.experts.0.w1.weight": ["stack.experts[0]", "other.experts[0]"],
    "mlp.experts.17.w1.weight": ["stack.experts[17]", "other.experts[17]"],
    "mlp.experts.x.w1.weight": [],  # an index is a number
    "mlp.experts.-1.w1.weight": [],
    "mlp.experts.1.2.w1.weight": [],
    "mlp.experts.*.w1.weight": [],
    "mlp.experts..w1.weight": [],
}


@pytest.mark.parametrize("name", RESOLVED)
def test_wildcards_match_whole_names(name: str) -> None:
    assert [str(target) for target in Wild(stub(n_experts=1)).resolve(name)] == RESOLVED[name]


def test_a_list_at_the_end_of_a_name() -> None:
    container = declare({"experts.*": "s.experts"}, {"s": Stack})(stub(n_experts=2))
    container.set_dependency("experts.1", A)
    container.set_dependency("experts.0", A)
    assert container.is_populated


def test_a_rule_without_wildcard_goes_first_and_two_wildcards_are_ambiguous() -> None:
    kind = declare({"a.*": "one.params", "*.b": "pair.first", "a.c": "pair.second"}, PARTS)
    container = kind(stub())
    assert [str(target) for target in container.resolve("a.c")] == ["pair.second"]
    with pytest.raises(ValueError, match=r"Wrong: 'a\.b' is matched by 2 rules: a\.\*, \*\.b"):
        container.set_dependency("a.b", A)


# -- filling


def test_filled_in_any_order_results_take_the_place_of_parameters() -> None:
    container: Any = Base(stub())
    assert container.finalized() == {} and not container.is_populated and not container.is_initialized
    for name in ("k", "norm.weight", "q"):
        container.set_dependency(name, B if name == "k" else A)
    assert container.is_populated and container.is_initialized and container.missing() == []
    assert torch.equal(container.qkv.data, torch.cat((A, B))) and torch.equal(container.norm.data, A)
    assert list(container.finalized()) == ["norm", "qkv"]


def test_one_source_feeds_several() -> None:
    container: Any = declare({"w": ["one.params", "pair.first"], "v": "pair.second"}, PARTS)(stub())
    container.set_dependency("w", A)
    container.set_dependency("v", B)
    assert torch.equal(container.one.data, A) and torch.equal(container.pair.data, torch.cat((A, B)))


def test_without_a_mapping_dependencies_are_set_by_hand() -> None:
    container = declare({}, {"one": One})(stub())
    with pytest.raises(ValueError, match="has no rule for 'w'; known: none"):
        container.set_dependency("w", A)
    container.one.params = A
    assert container.is_populated


def test_a_container_without_parameters_is_populated() -> None:
    assert declare({})(stub()).is_populated and declare({})(stub()).is_initialized


def test_what_is_missing_goes_by_its_source_name() -> None:
    container = Wild(stub(n_experts=2))
    container.set_dependency("mlp.experts.0.w1.weight", A)
    missing = ["*.norm.weight", "mlp.gate.w", "mlp.experts.1.w1.weight", "mlp.experts.1.w1.weight"]
    assert container.missing() == missing
    assert declare({}, {"one": One})(stub()).missing() == ["one.params"]


def test_initialized_means_on_the_models_device() -> None:
    model = stub()
    container = declare({}, {"one": One, "maybe": Maybe})(model)
    container.direct_injection("one", whole(A))
    container.direct_injection("maybe", None)
    assert container.is_populated and container.is_initialized
    model.device = torch.device("meta")
    assert container.is_populated and not container.is_initialized


def unknown(container: Base) -> None:
    container.set_dependency("norm.wieght", A)


def too_late(container: Base) -> None:
    container.set_dependency("norm.weight", A)
    container.set_dependency("norm.weight", A)


def twice(container: Base) -> None:
    container.set_dependency("q", A)
    container.set_dependency("q", A)


def inject_unknown(container: Base) -> None:
    container.direct_injection("nrom", whole(A))


def inject_twice(container: Base) -> None:
    container.direct_injection("norm", None)
    container.direct_injection("norm", None)


def inject_after_finalize(container: Base) -> None:
    container.set_dependency("norm.weight", A)
    container.direct_injection("norm", whole(A))


def inject_a_tensor(container: Base) -> None:
    container.direct_injection("norm", A)  # type: ignore[arg-type]


def set_after_injection(container: Base) -> None:
    container.direct_injection("norm", None)
    container.set_dependency("norm.weight", A)


def read_unknown(container: Base) -> None:
    _ = container.attn_norm


def fail_in_a_property(container: Base) -> None:
    del container.inference_model.device
    _ = container.is_initialized


MISUSE: list[tuple[Callable[[Base], None], type[Exception], str]] = [
    (unknown, ValueError, r"Base has no rule for 'norm\.wieght'; nearest: norm\.weight"),
    (too_late, ValueError, r"Base\.norm is finalised: 'norm\.weight' came too late or twice"),
    (twice, ValueError, r"Base\.qkv\.first was set already"),
    (inject_unknown, ValueError, r"Base has no parameter 'nrom'; it has norm, qkv"),
    (inject_twice, ValueError, r"Base\.norm is finalised already"),
    (inject_after_finalize, ValueError, r"Base\.norm is finalised already"),
    (inject_a_tensor, TypeError, r"Base\.norm takes an InferenceParameter or None, given .*Tensor"),
    (set_after_injection, ValueError, r"Base\.norm is finalised: 'norm\.weight' came too late or twice"),
    (read_unknown, AttributeError, r"Base has no parameter 'attn_norm'; it has norm, qkv"),
    (fail_in_a_property, AttributeError, "has no attribute 'device'"),
]


@pytest.mark.parametrize(("act", "kind", "message"), MISUSE, ids=[act.__name__ for act, _, _ in MISUSE])
def test_misuse_is_named(act: Callable[[Base], None], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        act(Base(stub()))


def test_a_list_entry_out_of_range_is_named() -> None:
    container = Wild(stub(n_experts=2))
    with pytest.raises(IndexError, match=r"Wild\.stack\.experts\[2\]: the list has 2 entries \(`n_experts`\)"):
        container.set_dependency("mlp.experts.2.w1.weight", A)


def test_lists_may_be_declared_by_a_class_of_ones_own() -> None:
    assert Stack.dependencies["experts"].list_type is Experts
