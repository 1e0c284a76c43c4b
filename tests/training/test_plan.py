"""What a plan says a rank holds: bytes worked out by hand, and what the engine holds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from phalanx.config import ConfigError
from phalanx.distributed.group import SoloGroup
from phalanx.distributed.mesh import Mesh
from phalanx.parallel import VerificationError
from phalanx.parallel.plan import hollow_model
from phalanx.parallel.registry import LayoutRegistry
from phalanx.training.plan import TrainingPlan, plan_settings, plan_training
from phalanx.training.precision import Precision
from phalanx.training.zero import FlatShards
from tests.parallel.models import tiny_config, tiny_model
from tests.parallel.real_sizes import PUBLISHED, hollow

NEOX_RULES = [
    {"patterns": [r".*\.query_key_value\.weight$"], "partition_type": "column"},
    {"patterns": [r".*\.attention\.dense\.weight$"], "partition_type": "row"},
    {"patterns": [r".*\.mlp\.dense_h_to_4h\.weight$"], "partition_type": "column"},
    {"patterns": [r".*\.mlp\.dense_4h_to_h\.weight$"], "partition_type": "row"},
]


def tiny_plan(name: str, given: dict[str, Any] | None = None, verify: Any = None, **sizes: Any) -> TrainingPlan:
    return plan_training(hollow_model(tiny_config(name)), plan_settings(given, **sizes), verify=verify)


@pytest.mark.parametrize("tp", [4, 8])
@pytest.mark.parametrize("name", PUBLISHED)
def test_every_one_is_proven(name: str, tp: int) -> None:
    found = plan_training(hollow(name), plan_settings(tp_size=tp))
    assert found.verdict is not None and found.verdict.tried and found.verdict.fault == ""


def memory(tp: int = 4, **sizes: Any) -> list[float]:
    """Of a tiny Llama's rank 0, in bytes a parameter: weights, gradients, masters and moments."""
    found = tiny_plan("llama", verify="off", tp_size=tp, **sizes)
    rank = found.memory[0]
    return [round(getattr(rank, name) / rank.parameters, 2) for name in ("weights", "gradients", "masters", "moments")]


def test_bytes_of_a_parameter_by_stage_and_dtype() -> None:
    assert memory(dp_size=4, stage=0) == [2, 4, 4, 8]
    assert memory(dp_size=4, stage=1) == [2, 1, 1, 2]
    assert memory(dp_size=4, stage=2) == [2, 1, 1, 2]
    assert memory(dp_size=1, stage=2, dtype="float16") == [2, 4, 4, 8]
    assert memory(dp_size=4, stage=3)[1:] == [1, 1, 2]
    assert memory(dp_size=4, stage=0, dtype="float32") == [4, 4, 0, 8]
    assert memory(dp_size=4, stage=1, dtype="float32") == [4, 1, 0, 2]


def test_stage_3_gathers_two_layers_and_what_lies_outside() -> None:
    model = hollow_model(tiny_config("llama"))
    rank = tiny_plan("llama", tp_size=1, dp_size=4, stage=3).memory[0]
    # It has two layers: all of it is gathered.
    assert rank.weights == 2 * sum(parameter.numel() for parameter in model.parameters())
    outside = sum(p.numel() for n, p in model.named_parameters() if ".layers." not in n)
    layer = sum(p.numel() for p in model.model.layers[0].parameters())
    assert rank.in_flight == max(outside, layer) * (2 + 4)


def test_gradients_of_several_passes_are_kept_in_fp32() -> None:
    given = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 4, "bf16": {"enabled": True}}
    for stage, gradients in ((0, 4), (1, 4), (2, 1)):
        found = tiny_plan("llama", given, tp_size=1, dp_size=4, stage=stage)
        assert found.memory[0].gradients == gradients * found.model.parameters
    assert tiny_plan("llama", given, tp_size=1, dp_size=4, stage=1).memory[0].in_flight == 0


def test_buckets_under_way_are_bounded() -> None:
    given = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 2, "reduce_bucket_size": 1000}}
    assert tiny_plan("llama", given, dp_size=2).memory[0].in_flight == 3 * 1000 * 2


@pytest.mark.parametrize(("optimizer", "states"), [("SGD", 0), ("Adam", 2), ("Adagrad", 1), (None, 2)])
def test_the_state_of_the_configs_optimizer(optimizer: str | None, states: int) -> None:
    given = {"optimizer": {"type": optimizer, "params": {"lr": "auto"}}} if optimizer else {}
    found = tiny_plan("llama", {"bf16": {"enabled": True}, **given})
    assert found.memory[0].moments == 4 * states * found.model.parameters
    assert (found.optimizer, found.assumed) == (optimizer or "AdamW", optimizer is None)


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_it_is_what_the_engine_holds(dtype: str, stage: int) -> None:
    """The flat tensors of a real model on one rank, after a step's last backward pass."""
    model = tiny_model("llama").float()
    settings = plan_settings(tp_size=1, stage=stage, dtype=dtype)
    planned = plan_training(hollow_model(tiny_config("llama")), settings).memory[0]
    mesh = Mesh(SoloGroup(), SoloGroup(), torch.device("cpu"))
    parameters = dict(model.named_parameters())
    shards = FlatShards(
        parameters,
        stage=stage,
        mesh=mesh,
        registry=LayoutRegistry.whole(model),
        precision=Precision.of(settings),
        bucket_size=10**9,
    )
    shards.begin(reduce=True)
    ids = torch.randint(0, 100, (2, 5))
    model(input_ids=ids, labels=ids).loss.backward()
    shards.end()
    shards.finish()
    fragments = [fragment.tensor for fragment in shards.fragments]
    optimizer = torch.optim.AdamW(fragments, foreach=False)
    optimizer.step()
    gradients = sum(each.grad.nbytes for each in fragments if each.grad is not None)
    moments = sum(v.nbytes for state in optimizer.state.values() for v in state.values() if v.dim())
    own = sum(each.nbytes for each in fragments if dtype != "float32")
    weights = sum(parameter.nbytes for parameter in parameters.values())
    assert (planned.weights, planned.gradients, planned.masters, planned.moments) == (weights, gradients, own, moments)


def test_settings_of_a_config_and_in_its_place(tmp_path: Path) -> None:
    given = {
        "train_batch_size": 32,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 4,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 1},
        "tensor_parallel": {"autotp_size": 2},
    }
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(given))
    read = plan_settings(str(path))
    assert (read.tp_size, read.data_parallel_size, read.zero.stage, read.bf16.enabled) == (2, 4, 1, True)
    changed = plan_settings(given, tp_size=8, stage=0, dtype="float16")
    assert (changed.tp_size, changed.data_parallel_size, changed.zero.stage) == (8, 4, 0)
    assert (changed.bf16.enabled, changed.fp16.enabled) == (False, True)
    with pytest.raises(ConfigError, match=r"train_batch_size: 32 is not .* 8 data-parallel ranks"):
        plan_settings(given, dp_size=8)


def test_what_a_trainer_fills_in() -> None:
    given: dict[str, Any] = dict.fromkeys(("train_batch_size", "train_micro_batch_size_per_gpu"), "auto")
    given |= {"bf16": {"enabled": "auto"}, "zero_optimization": {"stage": 2, "reduce_bucket_size": "auto"}}
    with pytest.raises(ConfigError, match="say which it will be"):
        plan_settings(given)
    assert plan_settings(given, dtype="float32").zero.stage == 2
    with pytest.raises(ConfigError, match="float32, bfloat16 or float16"):
        plan_settings(dtype="float64")


def test_rules_that_compute_another_function() -> None:
    wrong = [{**NEOX_RULES[0], "shape": [[32, 32, 32], -1], "partition_dim": 0}, *NEOX_RULES[1:]]
    given = {"tensor_parallel": {"partition_config": {"use_default_specs": False, "layer_specs": wrong}}}
    with pytest.raises(VerificationError, match="query_key_value"):
        tiny_plan("gpt_neox", given, tp_size=2)
    told = tiny_plan("gpt_neox", given, verify="warn", tp_size=2)
    assert told.verdict is not None and "query_key_value" in told.verdict.fault
    assert tiny_plan("gpt_neox", given, verify="off", tp_size=2).verdict is None
