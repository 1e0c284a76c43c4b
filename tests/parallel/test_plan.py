"""How real models are cut: against counts that were published, shapes worked out by hand, and `parallelize`."""

from __future__ import annotations

from functools import cache
from math import prod
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig

from phalanx.distributed.group import SoloGroup
from phalanx.distributed.mesh import Mesh
from phalanx.distributed.thread_group import run_threads
from phalanx.layout.rules import RuleError
from phalanx.parallel import parallelize
from phalanx.parallel.plan import GroupPlan, ModelPlan, _in_braces, hollow_model, plan_model
from phalanx.parallel.registry import LayoutRegistry
from tests.parallel.models import CONFIGS, tiny_config, tiny_model
from tests.parallel.real_sizes import PUBLISHED, hollow

NEOX_MLP = [
    {"patterns": [r".*\.mlp\.dense_h_to_4h\.weight$"], "partition_type": "column"},
    {"patterns": [r".*\.mlp\.dense_4h_to_h\.weight$"], "partition_type": "row"},
]


@cache
def planned(name: str, tp: int) -> ModelPlan:
    return plan_model(hollow(name), tp)


def group(plan: ModelPlan, ending: str) -> GroupPlan:
    (found,) = [each for each in plan.groups if each.name.endswith(ending)]
    return found


@pytest.mark.parametrize("tp", [1, 4, 8])
@pytest.mark.parametrize("name", PUBLISHED)
def test_counts(name: str, tp: int) -> None:
    plan = planned(name, tp)
    assert plan.parameters == PUBLISHED[name] == sum(parameter.numel() for parameter in hollow(name).parameters())
    held = sum(plan.held(rank) for rank in range(tp))
    assert held == plan.parameters + plan.copied
    # On several ranks are the parameters that are copied, and Falcon's one key and value head of 64 in 32 layers.
    whole = sum(each.parameters for each in plan.groups if each.style == "copied")
    parts = sum(each.held_elsewhere_too(rank) for each in plan.groups if each.style != "copied" for rank in range(tp))
    heads = {"falcon-7b": 32 * 2 * 64 * 4544}.get(name, 0) if tp > 1 else 0
    assert parts == tp * heads and plan.copied == (tp - 1) * (whole + heads)


def test_what_is_cut_how() -> None:
    styles = {
        each.name: (each.style, each.count, each.part, each.local_shapes[0])
        for each in planned("llama-3.1-70b", 8).groups
    }
    assert styles == {
        "model.embed_tokens.weight": ("vocab", 1, "embedding", (16032, 8192)),
        "model.layers.{0..79}.self_attn.q_proj.weight": ("column", 80, "attention", (1024, 8192)),
        "model.layers.{0..79}.self_attn.k_proj.weight": ("column", 80, "attention", (128, 8192)),
        "model.layers.{0..79}.self_attn.v_proj.weight": ("column", 80, "attention", (128, 8192)),
        "model.layers.{0..79}.self_attn.o_proj.weight": ("row", 80, "attention", (8192, 1024)),
        "model.layers.{0..79}.mlp.gate_proj.weight": ("column", 80, "MLP", (3584, 8192)),
        "model.layers.{0..79}.mlp.up_proj.weight": ("column", 80, "MLP", (3584, 8192)),
        "model.layers.{0..79}.mlp.down_proj.weight": ("row", 80, "MLP", (8192, 3584)),
        "model.layers.{0..79}.input_layernorm.weight": ("copied", 80, "norms", (8192,)),
        "model.layers.{0..79}.post_attention_layernorm.weight": ("copied", 80, "norms", (8192,)),
        "model.norm.weight": ("copied", 1, "norms", (8192,)),
        "lm_head.weight": ("vocab", 1, "embedding", (16032, 8192)),
    }
    assert all(each.source.startswith(("tp_plan: ", "structure")) for each in planned("llama-3.1-70b", 8).groups)


def test_ten_kv_heads_over_four_and_eight_ranks() -> None:
    # Each KV head of 128 comes with its 4 query heads: 6 x 128 rows of the fused projection, 512 inputs of the way out.
    for tp, heads in ((4, [3, 3, 2, 2]), (8, [2, 2, 1, 1, 1, 1, 1, 1])):
        fused, out = (group(planned("phi-4", tp), name) for name in ("qkv_proj.weight", "o_proj.weight"))
        assert [shape for shape, _ in fused.local_shapes] == [768 * n for n in heads]
        assert [shape for _, shape in out.local_shapes] == [512 * n for n in heads]
        assert fused.why_copied == "" and sum(fused.copies) == 0
        assert "phi3" in fused.source


def test_71_heads_that_share_one_kv_head() -> None:
    for tp, heads in ((4, [18, 18, 18, 17]), (8, [9] * 7 + [8])):
        fused, out = (
            group(planned("falcon-7b", tp), name) for name in ("query_key_value.weight", "attention.dense.weight")
        )
        assert [rows for rows, _ in fused.local_shapes] == [64 * n + 128 for n in heads]
        assert [columns for _, columns in out.local_shapes] == [64 * n for n in heads]
        assert fused.copies == (128 * 4544,) * tp and fused.why_copied == f"1 KV head for {tp} ranks"
        assert group(planned("falcon-7b", tp), "word_embeddings.weight").also == ("lm_head.weight",)


def test_a_rank_without_a_head_is_refused() -> None:
    with pytest.raises(RuleError, match=r"10 KV heads leave ranks .* without a head, .*use fewer ranks"):
        plan_model(hollow("phi-4"), 48)


def test_what_is_copied_and_why() -> None:
    why = {each.name: each.why_copied for each in planned("mixtral-8x7b", 4).groups if each.why_copied}
    assert why.pop("model.layers.{0..31}.mlp.gate.weight").startswith("router")
    assert set(why.values()) == {"norm"}
    assert group(planned("mixtral-8x7b", 4), "gate_up_proj").style == "experts"
    assert group(planned("pythia-6.9b", 4), "attention.dense.bias").why_copied.startswith("bias of a row layer")
    assert group(planned("qwen3-32b", 4), "q_norm.weight").partial
    few_heads = group(planned("llama-3.1-70b", 16), "k_proj.weight")
    assert few_heads.why_copied == "8 KV heads for 16 ranks" and few_heads.copies == (128 * 8192,) * 16


def test_what_no_rule_names_is_said() -> None:
    rules = {"use_default_specs": False, "layer_specs": NEOX_MLP}
    found = plan_model(hollow("pythia-6.9b"), 4, config=rules)
    assert group(found, "query_key_value.weight").why_copied == "no rule names it"
    assert group(found, "dense_h_to_4h.bias").style == "column" and found.hand_written


@pytest.mark.parametrize("name", CONFIGS)
def test_it_is_what_parallelize_does(name: str) -> None:
    """Shapes and partitions of every parameter on every rank."""
    plan = plan_model(hollow_model(tiny_config(name)), 2)
    models = [tiny_model(name) for _ in range(2)]

    def cut(group: Any) -> tuple[LayoutRegistry, int]:
        registry = parallelize(models[group.rank], Mesh(group, SoloGroup(), torch.device("cpu")), verify="off")
        return registry, sum(parameter.numel() for parameter in models[group.rank].parameters())

    for rank, (registry, held) in enumerate(run_threads(2, cut)):
        assert dict(registry) == dict(plan.registry) and held == plan.held(rank)
        shapes = {parameter: plan.held_of(parameter, rank) for parameter in registry}
        assert shapes == {parameter: prod(registry.local_shape(parameter)) for parameter in registry}


def test_names_of_layers_that_differ() -> None:
    """In every third layer of five there is something else, and one list lies inside the other."""
    names = [f"h.{n}.e.{m}.w" for n in range(5) for m in ((0, 1, 2) if n % 3 else (0, 2))]
    assert [each.text for each in _in_braces(names)] == ["h.{0,3}.e.{0,2}.w", "h.{1..2,4}.e.{0..2}.w"]
    assert sorted(name for each in _in_braces(names) for name in each.names) == names


def test_models_with_values_are_refused() -> None:
    with pytest.raises(ValueError, match="meta device"):
        plan_model(nn.Linear(2, 2), 1)
    with pytest.raises(ValueError, match="no causal language model of type 'clip'"):
        hollow_model(AutoConfig.for_model("clip"))
