"""InferencePolicy: how a policy enters the registry, collisions, and what it builds from."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from phalanx.engine.build import build_engine
from phalanx.models import (
    ContainerMap,
    DeclarationError,
    HFConfig,
    InferencePolicy,
    ModelConfigError,
    TransformerModel,
    load_families,
)
from phalanx.models.llama import LlamaLayer, LlamaOuter, LlamaPolicy
from phalanx.models.policy import policy_for
from phalanx.weights import WeightError, open_source
from tests.models.tiny import error, llama_config, reference


class Parts(InferencePolicy):
    """All that a policy needs, and no model type: not registered."""

    model_class = TransformerModel
    layer_container = LlamaLayer
    outer_container = LlamaOuter


def test_a_policy_is_registered_by_being_defined(policies: dict[str, Any]) -> None:
    class Mine(Parts):
        model_types = ("mine", "mine-too")

    assert policies["mine"] is policies["mine-too"] is Mine and policy_for(HFConfig({"model_type": "mine"})) is Mine
    assert Parts not in policies.values()


def test_a_child_takes_no_place_by_inheriting(policies: dict[str, Any]) -> None:
    class Child(LlamaPolicy):
        pass

    assert policies["llama"] is LlamaPolicy and Child.model_types == ("llama",)


def test_a_collision_is_refused_whole(policies: dict[str, Any]) -> None:
    with pytest.raises(DeclarationError, match=r"Mine: phalanx\.models\.llama\.LlamaPolicy serves model_type 'llama'"):

        class Mine(Parts):
            model_types = ("fresh", "llama")

    assert policies["llama"] is LlamaPolicy and "fresh" not in policies


def test_replace_takes_the_place(policies: dict[str, Any]) -> None:
    class Anew(Parts, replace=True):
        model_types = ("llama", "fresh")

    assert policies["llama"] is policies["fresh"] is Anew


def test_replace_holds_for_the_bases_model_types(policies: dict[str, Any]) -> None:
    class Extended(LlamaPolicy, replace=True):
        pass

    assert policies["llama"] is Extended


def test_a_module_that_is_loaded_again_replaces_its_own(policies: dict[str, Any]) -> None:
    def define() -> type[InferencePolicy]:
        class Mine(Parts):
            model_types = ("mine",)

        return Mine

    first, second = define(), define()
    assert policies["mine"] is second is not first


def test_the_built_in_families_come_first(policies: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    # As in a process that has not loaded them yet.
    monkeypatch.delitem(sys.modules, "phalanx.models.llama")
    policies.clear()
    with pytest.raises(DeclarationError, match="LlamaPolicy serves model_type 'llama' already"):
        type("Mine", (Parts,), {"model_types": ("llama",)})

    class Mine(Parts, replace=True):
        model_types = ("llama",)

    load_families()
    assert policies["llama"] is Mine


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"model_types": "llama"}, "Wrong: model_types is a tuple of names, given 'llama'"),
        ({"model_types": (1,)}, r"Wrong: model_types is a tuple of names, given \(1,\)"),
        ({"model_types": ("x",)}, r"Wrong: name its `model_class`, or override instantiate_model or build_model"),
        ({"model_types": ("x",), "model_class": TransformerModel}, "Wrong: name its `layer_container`, or override"),
        (
            {"model_types": ("x",), "model_class": TransformerModel, "layer_container": LlamaLayer},
            "Wrong: name its `outer_container`, or override make_outer_container or build_container_map",
        ),
    ],
)
def test_wrong_declarations(policies: dict[str, Any], body: dict[str, Any], message: str) -> None:
    with pytest.raises(DeclarationError, match=message):
        type("Wrong", (InferencePolicy,), body)
    assert "x" not in policies


def test_replace_without_model_types() -> None:
    with pytest.raises(DeclarationError, match="Wrong: replace=True, but no model_types say what to replace"):

        class Wrong(Parts, replace=True):
            pass


def test_hooks_stand_for_parts(policies: dict[str, Any]) -> None:
    class ByHooks(InferencePolicy):
        model_types = ("hooks",)
        model_class = TransformerModel

        def build_container_map(self) -> ContainerMap:
            return ContainerMap()

    assert policies["hooks"] is ByHooks


@pytest.mark.parametrize("both", [True, False])
def test_a_source_or_a_checkpoint_never_both_never_neither(both: bool) -> None:
    given: dict[str, Any] = {"source": open_source({}), "inference_checkpoint": "x"} if both else {}
    word = "both" if both else "neither"
    with pytest.raises(ValueError, match=f"Parts takes a weight source or an inference checkpoint, given {word}"):
        Parts(HFConfig({"model_type": "mine"}), **given)


def test_an_unknown_model_type_names_the_nearest(policies: dict[str, Any]) -> None:
    with pytest.raises(ModelConfigError, match=r"model_type 'lama' is not served; did you mean llama\? known: .*llama"):
        policy_for(HFConfig({"model_type": "lama"}))


def test_a_model_of_ones_own_is_served_by_being_defined(
    policies: dict[str, Any], tiny_llama: Any, tiny_folder: Path, tmp_path: Path
) -> None:
    built: list[TransformerModel] = []

    class MinePolicy(Parts):
        model_types = ("my_llama",)

        def instantiate_model(self, *args: Any) -> TransformerModel:
            built.append(super().instantiate_model(*args))
            return built[-1]

    folder = shutil.copytree(tiny_folder, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "my_llama"}))
    with build_engine(folder, num_blocks=8) as engine:
        assert engine.model is built[0] and engine.policy_name == "MinePolicy"
        assert error(engine.put([0], [[3, 4, 5]], logits="all"), reference(tiny_llama, [3, 4, 5], [3])) < 1e-4


def test_the_heads_own_name_is_ignored_where_it_is_tied(policies: dict[str, Any]) -> None:
    class Outer(LlamaOuter):
        PARAM_MAPPING = {"lm_head.weight": None, "embed_out.weight": "word_unembed.params"}

    class Mine(Parts):
        model_types = ("mine",)
        outer_container = Outer

    config = {**llama_config(num_hidden_layers=1, tie_word_embeddings=True).to_dict(), "model_type": "mine"}
    for name, known in (("embed_out.weight", True), ("lm_head.weight", True), ("head.weight", False)):
        with pytest.raises(WeightError) as caught:
            build_engine({name: torch.zeros(131, 48)}, hf_config=config, num_blocks=8)
        others = [problem for problem in caught.value.problems if not problem.startswith("missing")]
        assert [problem.split(":")[0] for problem in others] == ([] if known else ["unknown tensor 'head.weight'"])
