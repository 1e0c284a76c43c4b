"""What DeepSpeed's users write, on ranks; see `ranks`. Expected losses come from one process and torch alone."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import phalanx as deepspeed


@dataclass
class Unit:
    """The mpu of the published examples."""

    tp_group: Any
    dp_group: Any
    tp_size: int
    dp_size: int
    tp_rank: int
    dp_rank: int

    def get_data_parallel_group(self):
        return self.dp_group

    def get_model_parallel_group(self):
        return self.tp_group

    def get_data_parallel_world_size(self):
        return self.dp_size

    def get_model_parallel_world_size(self):
        return self.tp_size

    def get_data_parallel_rank(self):
        return self.dp_rank

    def get_model_parallel_rank(self):
        return self.tp_rank


def unit(tp_size: int, consecutive: bool = True) -> Unit:
    """Groups as the examples make them; `consecutive=False` swaps the two sides."""
    world, rank = dist.get_world_size(), dist.get_rank()
    dp_size = world // tp_size
    rows = [list(range(i * tp_size, (i + 1) * tp_size)) for i in range(dp_size)]
    columns = [list(range(i, world, tp_size)) for i in range(tp_size)]
    if not consecutive:
        rows, columns = ([list(range(i, world, dp_size)) for i in range(dp_size)], [])
        columns = [list(range(i * dp_size, (i + 1) * dp_size)) for i in range(tp_size)]
    made = [[(ranks, dist.new_group(ranks)) for ranks in side] for side in (rows, columns)]
    (tp_ranks, tp), (dp_ranks, dp) = (next(each for each in side if rank in each[0]) for side in made)
    return Unit(tp, dp, tp_size, dp_size, tp_ranks.index(rank), dp_ranks.index(rank))


def llama() -> nn.Module:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=67,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
    )


def batches(steps: int = 3, size: int = 4) -> torch.Tensor:
    return torch.randint(0, 67, (steps, size, 9), generator=torch.Generator().manual_seed(1))


def expected_losses(lr: Any = lambda step: 1e-2) -> list[float]:
    """AdamW without weight decay in one process, the rate of each step given."""
    model = llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr(0), weight_decay=0.0)
    losses = []
    for step, ids in enumerate(batches()):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        for group in optimizer.param_groups:
            group["lr"] = lr(step)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def train(engine: Any) -> list[float]:
    """The published loop; losses are the mean over the data-parallel ranks."""
    dp = engine.mesh.dp
    losses = []
    for ids in batches():
        mine = ids[dp.rank :: dp.size]
        loss = engine(input_ids=mine, labels=mine).loss
        engine.backward(loss)
        engine.step()
        losses.append(dp.all_reduce(loss.detach().clone()).item() / dp.size)
    return losses


def config(tp_size: int, **more: Any) -> dict[str, Any]:
    dp_size = dist.get_world_size() // tp_size
    return {
        "train_batch_size": 4,
        "train_micro_batch_size_per_gpu": 4 // dp_size,
        "zero_optimization": {"stage": 2},
        "tensor_parallel": {"autotp_size": tp_size},
        "data_parallel_size": dp_size,
        **more,
    }


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)


CLOSE = {"rel": 1e-4}


def case_the_published_examples() -> None:
    deepspeed.init_distributed()
    model = llama()
    optimizer = adamw(model)
    given = config(2)
    before = copy.deepcopy(given)
    engine, same, loader, schedule = deepspeed.initialize(model=model, optimizer=optimizer, config=given, mpu=unit(2))
    assert given == before
    assert isinstance(engine, deepspeed.DeepSpeedEngine) and same is optimizer and loader is None and schedule is None
    assert (engine.autotp_size(), engine.train_batch_size()) == (2, 4)
    assert train(engine) == pytest.approx(expected_losses(), **CLOSE)


def case_the_published_rules() -> None:
    specs = [
        {"patterns": [r".*\.self_attn\.[qkv]_proj\.weight$", r".*\.(gate|up)_proj\.weight$"]},
        {"patterns": [r".*\.o_proj\.weight$", r".*\.down_proj\.weight$"], "partition_type": "row"},
    ]
    rules = {"autotp_size": 2, "partition_config": {"use_default_specs": False, "layer_specs": specs}}
    deepspeed.set_autotp_mode(training=True)
    model = deepspeed.tp_model_init(llama(), tp_size=2, dtype=torch.float32)
    engine, *_ = deepspeed.initialize(model=model, optimizer=adamw(model), config=config(2, tensor_parallel=rules))
    assert engine.registry["model.layers.0.self_attn.q_proj.weight"].partition.kind != "replicate"
    assert train(engine) == pytest.approx(expected_losses(), **CLOSE)


def case_other_configs_on_the_ranks() -> None:
    rates = {"type": "AdamW", "params": {"lr": 1e-2 * (1 + dist.get_rank())}}
    with pytest.raises(ValueError, match=r"rank 1 says optimizer: .*0\.02.*rank 0 says optimizer: .*0\.01"):
        deepspeed.initialize(model=llama(), config=config(2, optimizer=rates))


def case_optimizer_and_schedule_of_the_config() -> None:
    named = config(
        2,
        optimizer={"type": "Adam", "params": {"lr": 1.0, "weight_decay": 0.0}},
        scheduler={
            "type": "WarmupLR",
            "params": {"warmup_min_lr": 1e-3, "warmup_max_lr": 1e-2, "warmup_num_steps": 2, "warmup_type": "linear"},
        },
    )
    engine, optimizer, _, schedule = deepspeed.initialize(model=llama(), config=named)
    assert type(optimizer) is deepspeed.FusedAdam and schedule is engine.lr_scheduler
    # DeepSpeed's warm-up: the first rate before the first and the second step, then half way.
    assert train(engine) == pytest.approx(expected_losses(lambda step: [1e-3, 1e-3, 5.5e-3][step]), **CLOSE)
    assert engine.get_lr() == pytest.approx([1e-2])


def case_what_makes_an_optimizer_and_a_schedule() -> None:
    model = llama()
    engine, optimizer, _, schedule = deepspeed.initialize(
        model=model,
        model_parameters=(p for p in model.parameters()),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.0),
        lr_scheduler=lambda made: torch.optim.lr_scheduler.ConstantLR(made, factor=1.0),
        config=config(1),
    )
    assert isinstance(schedule, torch.optim.lr_scheduler.ConstantLR) and schedule.optimizer is optimizer
    assert train(engine) == pytest.approx(expected_losses(), **CLOSE)


def case_two_engines_of_other_sizes() -> None:
    first = deepspeed.tp_model_init(llama(), tp_size=2, dtype=torch.float32)
    second = llama()
    engine, *_ = deepspeed.initialize(model=first, optimizer=adamw(first), config={"train_batch_size": 4})
    other, *_ = deepspeed.initialize(model=second, optimizer=adamw(second), config={"train_batch_size": 4})
    assert (engine.mesh.tp.size, other.mesh.tp.size) == (2, 1)
    assert train(other) == pytest.approx(expected_losses(), **CLOSE)
    assert train(engine) == pytest.approx(expected_losses(), **CLOSE)


def case_tp_model_init_with_a_group() -> None:
    groups = unit(2)
    model = llama()
    deepspeed.tp_model_init(model, tp_size=2, dtype=torch.float32, tp_group=groups.tp_group)
    # An mpu beside it, as in a published script, says the same of the ranks.
    engine, *_ = deepspeed.initialize(model=model, optimizer=adamw(model), config=config(2), mpu=groups)
    assert engine.autotp_size() == 2
    assert train(engine) == pytest.approx(expected_losses(), **CLOSE)


def case_tp_model_init_with_a_group_of_another_size() -> None:
    with pytest.raises(ValueError, match=f"has {dist.get_world_size()} ranks, but tp_size is 1"):
        deepspeed.tp_model_init(llama(), tp_size=1, tp_group=dist.new_group(list(range(dist.get_world_size()))))


def case4_a_contradicting_mpu() -> None:
    model = llama()
    for groups, tp_size, told in (
        (unit(4), 2, r"get_model_parallel_world_size\(\) is 4"),
        (unit(2), 1, r"get_model_parallel_world_size\(\) is 2"),
    ):
        with pytest.raises(ValueError, match=told):
            deepspeed.initialize(model=model, optimizer=adamw(model), config=config(tp_size), mpu=groups)
    swapped = unit(2, consecutive=False)
    swapped.get_model_parallel_rank = swapped.get_data_parallel_rank = lambda: None
    with pytest.raises(ValueError, match=r"holds the ranks .* expected"):
        deepspeed.initialize(model=model, optimizer=adamw(model), config=config(2), mpu=swapped)
    given = config(2)
    given["tensor_parallel"]["tp"] = {"tp_group": swapped.tp_group}
    with pytest.raises(ValueError, match=r"tensor_parallel\.tp\.tp_group holds the ranks"):
        deepspeed.initialize(model=model, optimizer=adamw(model), config=given)
    deepspeed.tp_model_init(model, tp_size=2, tp_group=swapped.tp_group)
    with pytest.raises(ValueError, match="tp_group of the ranks"):
        deepspeed.initialize(model=model, optimizer=adamw(model), config=config(2))
    # None of them has changed the model.
    assert model.model.layers[0].self_attn.q_proj.weight.shape == (32, 32)


def case_training_data_is_shared_out_over_dp() -> None:
    world = dist.get_world_size()
    tp_size = 2 if world == 4 else 1
    samples = [torch.tensor(i) for i in range(10)]
    model = nn.Linear(2, 2)
    engine, _, loader, _ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        training_data=samples,
        config={"train_micro_batch_size_per_gpu": 2, "tensor_parallel": {"autotp_size": 1}},
    )
    assert len(loader) == -(-10 // world // 2) and tp_size
    passes = [torch.cat(list(loader)).tolist() for _ in range(2)]
    assert passes[0] != passes[1]
    for mine in passes:
        everyone: list[Any] = [None] * world
        dist.all_gather_object(everyone, mine)
        assert sorted({sample for each in everyone for sample in each}) == list(range(10))
        assert len({len(each) for each in everyone}) == 1
    assert engine.device.type == "cpu"


def case_comm() -> None:
    comm = deepspeed.comm
    world = dist.get_world_size()
    assert comm.is_initialized() and comm.get_world_size() == world and comm.get_rank() == dist.get_rank()
    assert comm.get_all_ranks_from_group(comm.get_world_group()) == list(range(world))
    one = torch.ones(1)
    comm.inference_all_reduce(one)
    assert one.item() == world
    comm.barrier()
