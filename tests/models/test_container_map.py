"""ContainerMap: which container a name belongs to, and that begin() and validate() report everything at once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pytest
import torch

from phalanx.models import ContainerMap, LayerContainer
from phalanx.weights import WeightError
from tests.models.kit import Maybe, One, Pair, Stack, numbered, stub, whole

A, B = numbered(2, 3), numbered(1, 3)


class Plain(LayerContainer):
    norm: One
    qkv: Pair
    bias: Maybe

    PARAM_MAPPING = {"norm.weight": "norm.params", "q": "qkv.first", "k": "qkv.second", "b": "bias.params"}


class Sparse(Plain):
    experts: Stack

    PARAM_MAPPING = {"experts.*.w": "experts.experts"}


class SizedNorm(One):
    """A norm whose size is the stub's ``hidden``."""

    def expected_shape(self, dependency: str, ndim: int) -> tuple[int, ...]:
        return (self.inference_model.hidden,)  # type: ignore[attr-defined]


class Outer(LayerContainer):
    emb: One
    final: SizedNorm

    PARAM_MAPPING = {"model.embed.weight": "emb.params", "model.layers.norm.weight": "final.params"}


def container_map(
    kinds: Iterable[type[LayerContainer]] = (Plain, Sparse), prefixes: Any = "model.layers", **model: Any
) -> ContainerMap:
    """Layers of these classes, the outer container, and two names that are ignored."""
    it = stub(**{"n_experts": 2, "hidden": 3, **model})
    result = ContainerMap()
    result.set_transformer_params(prefixes, [kind(it) for kind in kinds])
    result.set_non_transformer_params(Outer(it))
    result.set_unmapped_params("model.vision")
    result.set_unmapped_params(["*.inv_freq"])
    return result


def checkpoint(**changes: Any) -> dict[str, Any]:
    """The shapes of a checkpoint that fits; a change to None takes a name out."""
    layers = [f"model.layers.{layer}.{name}" for layer in (0, 1) for name in ("norm.weight", "q", "k")]
    experts = [f"model.layers.1.experts.{index}.w" for index in (0, 1)]
    names = dict.fromkeys(["model.embed.weight", "model.layers.norm.weight", *layers, *experts], (3,))
    return {name: shape for name, shape in {**names, **changes}.items() if shape is not None}


def test_filled_in_the_reverse_order() -> None:
    filled = container_map()
    names = list(checkpoint())
    filled.begin(names)
    for name in reversed(names):
        filled.map_param(name, torch.ones(3))
    filled.validate()
    first, second = filled.transformer_params  # of mixed classes
    experts = second.finalized()["experts"]
    assert first.bias is None and experts is not None and experts.shape == (2, 3)
    assert filled.non_transformer_params is not None and filled.non_transformer_params.is_initialized


LOCATED: dict[str, str | None] = {
    "model.layers.0.norm.weight": "Plain.norm",
    "model.layers.1.experts.1.w": "Sparse.experts[1]",
    "model.layers.norm.weight": "Outer.final",  # no index: not a layer
    "model.embed.weight": "Outer.emb",
    "model.vision": None,
    "model.vision.tower.0.w": None,
    "model.layers.0.attn.inv_freq": None,
    "inv_freq.model.layers.0.inv_freq": None,
}


@pytest.mark.parametrize("name", LOCATED)
def test_names_are_classified(name: str) -> None:
    target = LOCATED[name]
    filled = container_map()
    filled.map_param(name, A)
    before = [container.missing() for container in _containers(container_map())]
    changed = [type(c).__name__ for c, old in zip(_containers(filled), before, strict=True) if c.missing() != old]
    assert changed == ([] if target is None else [target.partition(".")[0]])


def _containers(filled: ContainerMap) -> list[LayerContainer]:
    assert filled.non_transformer_params is not None
    return [*filled.transformer_params, filled.non_transformer_params]


UNKNOWN: dict[str, str] = {
    "model.layers.0.norm.wieght": "Plain has no rule for it; nearest: norm.weight",
    "model.layers.0.experts.0.w": "Plain has no rule for it",
    "model.layers.2.q": "the model has layers 0 to 1",
    "model.layers.-1.q": "neither under model.layers.<layer> nor known outside the layers",
    "model.layers.0": "Plain has no rule for it",
    "model.layers_0.q": "neither under model.layers.<layer>",
    "xmodel.layers.0.q": "neither under model.layers.<layer>",
    "model.embd.weight": "nor known outside the layers; nearest: model.embed.weight",
    "model.visionary.w": "neither under",  # a prefix ends at a dot
    "model.layers.0.attn.inv_freq2": "Plain has no rule for it",
    "model.layers.²": "neither under",
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_an_unknown_name_is_an_error_that_names_the_nearest(name: str) -> None:
    filled = container_map()
    with pytest.raises(ValueError) as mapped:
        filled.map_param(name, A)
    with pytest.raises(WeightError) as announced:
        filled.begin(checkpoint(**{name: (3,)}))
    assert f"unknown tensor {name!r}" in str(mapped.value) and UNKNOWN[name] in str(mapped.value)
    assert announced.value.problems == [str(mapped.value)]


@pytest.mark.parametrize("prefixes", [("h", "model.layers"), ["model.layers", "h"]])
def test_several_prefixes(prefixes: Any) -> None:
    filled = container_map((Plain, Plain), prefixes)
    filled.map_param("h.0.norm.weight", A)
    filled.map_param("model.layers.1.norm.weight", B)
    first, second = filled.transformer_params
    assert torch.equal(first.norm.data, A) and torch.equal(second.norm.data, B)
    with pytest.raises(ValueError, match=r"neither under (h|model\.layers)\.<layer> or (h|model\.layers)\.<layer>"):
        filled.map_param("g.0.norm.weight", A)


def test_begin_reports_every_problem_at_once() -> None:
    names = checkpoint(
        **{
            "model.layers.0.q": None,
            "model.layers.1.experts.1.w": None,
            "model.layers.1.experts.7.w": (3,),
            "model.layers.0.norm.weihgt": (3,),
            "model.layers.9.q": (3,),
            "model.layers.norm.weight": (4, 2),
            "model.layers.1.b": (3,),
            "extra": (3,),
        }
    )
    filled = container_map(has_bias=False)
    with pytest.raises(WeightError) as caught:
        filled.begin(names, ["file b is absent"])
    assert sorted(caught.value.problems) == [
        "file b is absent",
        "missing: model.layers.0.q",
        "missing: model.layers.1.experts.1.w",
        "not expected: model.layers.1.b: a trait of the model says that there is none",
        "unknown tensor 'extra': it is neither under model.layers.<layer> nor known outside the layers; "
        "known: model.embed.weight, model.layers.norm.weight",
        "unknown tensor 'model.layers.0.norm.weihgt': Plain has no rule for it; nearest: norm.weight",
        "unknown tensor 'model.layers.1.experts.7.w': Sparse.experts.experts[7], but the model has 2 of them",
        "unknown tensor 'model.layers.9.q': the model has layers 0 to 1",
        "wrong shape: model.layers.norm.weight is (4, 2), the config asks for (3,)",
    ]
    assert str(caught.value).splitlines() == caught.value.problems
    # Nothing was settled: the same map takes the right checkpoint.
    filled.begin(checkpoint())


def test_problems_found_elsewhere_are_enough() -> None:
    with pytest.raises(WeightError, match=r"^file x is absent$"):
        container_map().begin(checkpoint(), ["file x is absent"])


@pytest.mark.parametrize("has_bias", [True, False, None])
@pytest.mark.parametrize("stored", [True, False])
def test_biases_come_as_the_config_says(has_bias: bool | None, stored: bool) -> None:
    names = ["model.layers.0.b", "model.layers.1.b"] if stored else []
    filled = container_map(has_bias=has_bias)
    announced = {**checkpoint(), **dict.fromkeys(names, (3,))}
    if has_bias is not None and has_bias != stored:
        with pytest.raises(WeightError) as caught:
            filled.begin(announced)
        word = "missing" if has_bias else "not expected"
        assert [p.split(": ")[:2] for p in caught.value.problems] == [[word, f"model.layers.{i}.b"] for i in (0, 1)]
        return
    filled.begin(announced)
    for name in announced:
        filled.map_param(name, torch.ones(3))
    filled.validate()
    assert [container.bias is not None for container in filled.transformer_params] == [stored, stored]


def test_a_dependency_that_two_tensors_feed() -> None:
    filled = container_map((Plain, Sparse), ("model.layers", "h"))
    with pytest.raises(WeightError) as caught:
        filled.begin(checkpoint(**{"h.0.q": (3,)}))
    assert caught.value.problems == ["fed twice: h.0.q and model.layers.0.q are both Plain.qkv.first"]


def test_an_ambiguous_name_is_among_the_problems() -> None:
    class Ambiguous(LayerContainer):
        one: One
        two: One
        PARAM_MAPPING = {"*.w": "one.params", "a.*": "two.params"}

    filled = container_map((Ambiguous,))
    with pytest.raises(WeightError, match=r"'a\.w' is matched by 2 rules: \*\.w, a\.\*"):
        filled.begin(["model.layers.0.a.w"])


def test_names_without_shapes_are_enough() -> None:
    container_map().begin(iter(checkpoint()))
    container_map().begin(dict.fromkeys(checkpoint()))


def fill(filled: ContainerMap, names: Mapping[str, Any]) -> None:
    for name in names:
        filled.map_param(name, torch.ones(3))


def test_validate_reports_everything_that_is_missing() -> None:
    filled = container_map(has_bias=True)
    fill(
        filled, checkpoint(**{"model.layers.0.q": None, "model.layers.1.experts.1.w": None, "model.embed.weight": None})
    )
    with pytest.raises(WeightError) as caught:
        filled.validate()
    assert sorted(caught.value.problems) == [
        "missing: model.embed.weight",
        "missing: model.layers.0.b",
        "missing: model.layers.0.q",
        "missing: model.layers.1.b",
        "missing: model.layers.1.experts.1.w",
    ]


def test_validate_settles_what_was_never_announced() -> None:
    filled = container_map()
    fill(filled, checkpoint())
    assert "bias" not in filled.transformer_params[0].finalized()
    filled.validate()
    assert filled.transformer_params[0].finalized()["bias"] is None


def test_what_was_settled_as_absent_comes_too_late() -> None:
    filled = container_map()
    filled.begin(checkpoint())
    with pytest.raises(ValueError, match=r"Plain\.bias is finalised: 'b' came too late or twice"):
        filled.map_param("model.layers.0.b", A)


def test_validate_sees_parameters_on_another_device() -> None:
    filled = container_map((Plain,))
    names = [name for name in checkpoint() if "layers.1" not in name and name != "model.layers.0.norm.weight"]
    fill(filled, dict.fromkeys(names))
    filled.transformer_params[0].direct_injection("norm", whole(torch.empty(3, device="meta")))
    with pytest.raises(WeightError, match=r"^model\.layers\.0\.Plain is not finalised, or not on the model's device$"):
        filled.validate()


def test_an_empty_map_knows_nothing() -> None:
    empty = ContainerMap()
    empty.validate()
    with pytest.raises(WeightError, match="unknown tensor 'w': it is neither under a layer prefix nor known outside"):
        empty.begin(["w"])
