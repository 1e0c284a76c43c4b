"""Rules that compute another function are found before they touch the model, and the layout that fits is named."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from phalanx.distributed.group import Group, SoloGroup
from phalanx.distributed.mesh import Mesh
from phalanx.distributed.thread_group import run_threads
from phalanx.layout.rules import RuleError
from phalanx.parallel import VerificationError, VerificationWarning, parallelize
from phalanx.parallel.small_model import small_model
from phalanx.parallel.verify import trial
from tests.parallel.models import CONFIGS, batch, tiny_config, tiny_model

NEOX = [
    {"patterns": [r".*\.attention\.query_key_value\.weight$"], "partition_type": "column"},
    {"patterns": [r".*\.attention\.dense\.weight$"], "partition_type": "row"},
    {"patterns": [r".*\.mlp\.dense_h_to_4h\.weight$"], "partition_type": "column"},
    {"patterns": [r".*\.mlp\.dense_4h_to_h\.weight$"], "partition_type": "row"},
]


def neox_rules(**first: Any) -> dict[str, Any]:
    return {"use_default_specs": False, "layer_specs": [{**NEOX[0], **first}, *NEOX[1:]]}


def run(model: Any, world: int = 2, **options: Any) -> list[float]:
    models = [copy.deepcopy(model) for _ in range(world)]

    def rank(group: Group) -> float:
        parallelize(models[group.rank], Mesh(group, SoloGroup(), torch.device("cpu")), **options)
        return models[group.rank](**batch(103)).loss.item()

    return run_threads(world, rank)


@pytest.mark.parametrize("name", CONFIGS)
def test_every_known_layout_is_proven(name: str) -> None:
    verdict = trial(tiny_model(name), 2)
    assert verdict.tried, verdict.fault
    assert not verdict.fault


def test_a_stacked_layout_on_a_head_major_projection_is_refused() -> None:
    rules = neox_rules(shape=((32, 32, 32), -1), partition_dim=0)
    with pytest.raises(VerificationError) as error:
        run(tiny_model("gpt_neox"), config=rules)
    assert "gpt_neox.layers.0.attention.query_key_value.weight" in str(error.value)
    assert "layer_specs[0]" in str(error.value)
    assert "each head's (or KV group's) q, k and v side by side" in str(error.value)


def test_the_same_rules_go_on_with_a_warning() -> None:
    model = tiny_model("gpt_neox")
    with pytest.warns(VerificationWarning, match="query_key_value"):
        losses = run(model, config=neox_rules(shape=((32, 32, 32), -1), partition_dim=0), verify="warn")
    assert abs(losses[0] - model(**batch(103)).loss.item()) > 1e-3


@pytest.mark.parametrize(
    "options", [{"config": neox_rules()}, {"preset": "gpt_neox"}, {}], ids=["rules", "preset", "none"]
)
def test_without_a_shape_the_known_layout_is_taken(options: dict[str, Any]) -> None:
    model = tiny_model("gpt_neox")
    assert run(model, verify="error", **options)[0] == pytest.approx(model(**batch(103)).loss.item(), rel=1e-6)


def test_a_declared_view_is_taken() -> None:
    model = tiny_model("gpt_neox")
    rules = neox_rules(view=(4, 3, 8), axis=0)
    assert run(model, config=rules)[0] == pytest.approx(model(**batch(103)).loss.item(), rel=1e-6)


def test_a_wrong_gate_layout_is_refused() -> None:
    rules = {
        "use_default_specs": False,
        "layer_specs": [
            {"patterns": [r".*\.self_attn\.qkv_proj\.weight$"], "shape": ((32, 16, 16), -1), "partition_dim": 0},
            {"patterns": [r".*\.self_attn\.o_proj\.weight$"], "partition_type": "row"},
            {"patterns": [r".*\.mlp\.gate_up_proj\.weight$"], "view": (44, 2), "axis": 0},
            {"patterns": [r".*\.mlp\.down_proj\.weight$"], "partition_type": "row"},
        ],
    }
    model = tiny_model("phi3")
    with pytest.raises(RuleError, match=r"gate_up_proj.*down_proj.*cut them alike"):
        run(model, config=rules)
    rules["layer_specs"][2] = {"patterns": [r".*\.mlp\.gate_up_proj\.weight$"], "shape": (2, -1), "partition_dim": 0}
    assert run(model, config=rules)[0] == pytest.approx(model(**batch(103)).loss.item(), rel=1e-6)


def test_rows_of_a_multi_query_projection_are_refused_with_an_explanation() -> None:
    rules = {
        "use_default_specs": False,
        "layer_specs": [
            {"patterns": [r".*\.query_key_value\.weight$"], "partition_type": "row", "partition_dim": 0},
            {"patterns": [r".*\.self_attention\.dense\.weight$"], "partition_type": "row"},
        ],
    }
    with pytest.raises(RuleError, match="row"):
        run(tiny_model("falcon_multi_query"), config=rules)
    del rules["layer_specs"][0]["partition_dim"]
    with pytest.raises(RuleError, match=r"query_key_value.*column"):
        run(tiny_model("falcon_multi_query"), config=rules)


def test_the_trial_leaves_the_random_state_alone() -> None:
    model = tiny_model("llama")
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    trial(model, 2)
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize("name", ["llama", "gpt_neox", "phi3", "falcon_grouped", "qwen3", "gemma2", "mixtral"])
def test_the_small_model_is_small_and_keeps_its_heads(name: str) -> None:
    from transformers import AutoModelForCausalLM

    wide = {"hidden_size": 2048, "num_hidden_layers": 30, "num_attention_heads": 32, "vocab_size": 50000}
    if not name.startswith("falcon"):
        wide["intermediate_size"] = 5632
    if "head_dim" in CONFIGS[name]:
        wide["head_dim"] = 64
    config = tiny_config(name, **wide)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    small = small_model(model)
    assert small is not None
    assert sum(p.numel() for p in small.model.parameters()) < 4_000_000
    assert small.model.config.num_attention_heads == 32
    assert config.hidden_size == 2048


def test_an_unknown_module_is_reported_as_not_verified() -> None:
    verdict = trial(torch.nn.Linear(4, 4), 2)
    assert not verdict.tried
    assert "not verified" in verdict.fault


def test_ranks_with_different_models_are_refused() -> None:
    def rank(group: Group) -> None:
        parallelize(tiny_model_by_rank[group.rank], Mesh(group, SoloGroup(), torch.device("cpu")))

    tiny_model_by_rank = [tiny_model("llama", seed=seed) for seed in (0, 1)]
    with pytest.raises(ValueError, match=r"ranks \[1\] differ from rank 0 in \d+ of 21 parameters"):
        run_threads(2, rank)


def test_sequence_parallelism_refuses_a_loss_over_all_router_logits() -> None:
    with pytest.raises(ValueError, match="output_router_logits"):
        run(tiny_model("mixtral_aux_loss"), sequence_parallel=True)


def test_more_ranks_than_heads_are_refused() -> None:
    with pytest.raises(RuleError, match="without a head"):
        run(tiny_model("gpt2", n_head=2), world=4)


def test_what_a_cut_model_cannot_give_is_refused() -> None:
    model = tiny_model("llama")
    model.set_attn_implementation("eager")
    models = [copy.deepcopy(model) for _ in range(2)]

    def rank(group: Group) -> None:
        mine = models[group.rank]
        mesh = Mesh(group, SoloGroup(), torch.device("cpu"))
        parallelize(mine, mesh, sequence_parallel=True)
        inputs = batch(103)
        with pytest.raises(ValueError, match=r"output_attentions=True: a rank .* some of the heads"):
            mine(**inputs, output_attentions=True)
        with pytest.raises(ValueError, match=r"output_hidden_states=True: a rank .* some of the tokens"):
            mine(**inputs, output_hidden_states=True)
        with pytest.raises(RuntimeError, match="one rank's shards"):
            mine.save_pretrained("anywhere")
        with pytest.raises(ValueError, match="cut already"):
            parallelize(mine, mesh)
        with pytest.raises((IndexError, RuntimeError)):
            mine(input_ids=torch.full((1, 4), 103))

    run_threads(2, rank)


def test_models_of_other_shapes_are_refused_before_anything_is_exchanged() -> None:
    models = [tiny_model("llama"), tiny_model("llama", num_hidden_layers=3)]

    def rank(group: Group) -> None:
        with pytest.raises(ValueError, match=r"requires_grad of the parameters of ranks \[1\]"):
            parallelize(models[group.rank], Mesh(group, SoloGroup(), torch.device("cpu")))

    run_threads(2, rank)


def test_a_module_that_layers_share_is_cut_once() -> None:
    model = tiny_model("llama")
    model.model.layers[1].mlp = model.model.layers[0].mlp
    assert run(model)[0] == pytest.approx(model(**batch(103)).loss.item(), rel=1e-6)


def test_hooks_on_a_layer_that_is_cut_are_told_of() -> None:
    model = tiny_model("llama")
    model.model.layers[0].mlp.up_proj.register_forward_hook(lambda module, args, out: out)
    with pytest.warns(UserWarning, match=r"layers\.0\.mlp\.up_proj has forward hooks"):
        run(model)
