"""Cases for 2 ranks: what the engine trains is what a plain torch loop trains."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch import nn
from torch.distributed.fsdp import FSDPModule

from phalanx.distributed.mesh import Mesh
from phalanx.layout import shard
from phalanx.training.engine import TrainingEngine
from phalanx.training.repoint import ELEMENTWISE
from tests.training.loops import (
    adamw_in_groups,
    assert_same,
    engine_for,
    engine_loop,
    mlp,
    plain_loop,
    regression,
    regression_loss,
    sgd,
)
from tests.training.split_model import LAYOUTS, SplitModel

STEPS = 8


def check_mlp(make_optimizer: Any, *, passes: int = 1, clip: float = 0.0, **options: Any) -> None:
    mesh = Mesh.build()
    steps = regression(STEPS, mesh.dp.size * passes)
    expected = plain_loop(mlp(), make_optimizer, regression_loss, steps, clip=clip)
    engine = engine_for(mlp(seed=mesh.dp.rank), make_optimizer, mesh, passes=passes, clip=clip, **options)
    assert_same(engine_loop(engine, regression_loss, steps), expected)
    assert engine.global_steps == STEPS
    engine.destroy()


def case_sgd_at_every_stage() -> None:
    for stage in range(3):
        check_mlp(sgd, stage=stage)


def case_adamw_in_groups_clipped() -> None:
    for stage in range(3):
        check_mlp(adamw_in_groups, stage=stage, clip=0.1)


def case_accumulation() -> None:
    for stage in range(3):
        check_mlp(adamw_in_groups, stage=stage, passes=4, clip=0.5)


def case_one_large_and_many_tiny_buckets() -> None:
    check_mlp(sgd, stage=1, bucket=10**9)
    check_mlp(sgd, stage=2, bucket=1)


def check_split(tp: int, *, passes: int = 1, clip: float = 0.0, tolerance: float = 1e-5, **options: Any) -> None:
    mesh = Mesh.build(tp)
    steps = regression(STEPS, mesh.dp.size * passes)
    expected = plain_loop(SplitModel(), adamw_in_groups, regression_loss, steps, clip=clip)
    model = SplitModel(mesh.tp)
    engine = engine_for(model, adamw_in_groups, mesh, registry=model.registry, passes=passes, clip=clip, **options)
    run = engine_loop(engine, regression_loss, steps)
    for name, layout in LAYOUTS.items():
        whole = expected.parameters[name]
        expected.parameters[name] = shard(whole, layout.partition, mesh.tp.rank, mesh.tp.size)
    assert_same(run, expected, tolerance)
    engine.destroy()


def case_norm_counts_every_element_once() -> None:
    for stage in range(3):
        check_split(2, stage=stage, clip=0.3)


def case_tensor_parallel_accumulation() -> None:
    check_split(2, stage=1, passes=4, clip=0.3)


def case_all_ranks_in_one_tensor_parallel_group() -> None:
    check_split(dist.get_world_size(), stage=2, clip=0.3)


def case_unused_and_frozen_parameters() -> None:
    """The second rank never uses one layer, no rank uses another, a third is frozen."""

    class Branches(nn.Module):
        def __init__(self, rank: int, seed: int) -> None:
            super().__init__()
            self.rank = rank
            torch.manual_seed(seed)
            self.common, self.first, self.never, self.frozen = (nn.Linear(6, 6) for _ in range(4))
            self.head = nn.Linear(6, 3)
            self.frozen.requires_grad_(False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.frozen(torch.tanh(self.common(x)))
            return self.head(self.first(x) if self.rank == 0 else x)

    mesh = Mesh.build()
    steps = regression(STEPS, mesh.dp.size)
    branches = [Branches(0, 0), Branches(1, 0)]
    for name, parameter in branches[0].named_parameters():  # one set of parameters, used in two ways
        owner, leaf = branches[1].get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]
        setattr(owner, leaf, parameter)
    tagged = [[(min(rank, 1), *batch) for rank, batch in enumerate(step)] for step in steps]

    def plain_loss(_: Any, batch: Any) -> torch.Tensor:
        return regression_loss(branches[batch[0]], batch[1:])

    expected = plain_loop(branches[0], adamw_in_groups, plain_loss, tagged, clip=0.5)
    unequal_ranks = hasattr(FSDPModule, "set_reduce_scatter_unused_params")  # since torch 2.13
    for stage in range(4 if unequal_ranks else 3):
        engine = engine_for(Branches(mesh.dp.rank, mesh.dp.rank), adamw_in_groups, mesh, stage=stage, clip=0.5)
        assert_same(engine_loop(engine, regression_loss, steps), expected)
        engine.destroy()


def case_scheduler_and_groups_stay_the_users() -> None:
    def scheduler(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))

    mesh = Mesh.build()
    steps = regression(STEPS, mesh.dp.size)
    expected = plain_loop(mlp(), adamw_in_groups, regression_loss, steps, scheduler=scheduler)
    model = mlp()
    optimizer = adamw_in_groups(model)
    groups = list(optimizer.param_groups)
    schedule = scheduler(optimizer)
    engine = engine_for(model, lambda _: optimizer, mesh, stage=1, scheduler=lambda _: schedule)
    assert_same(engine_loop(engine, regression_loss, steps), expected)
    assert all(a is b for a, b in zip(optimizer.param_groups, groups, strict=True))
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
    assert engine.get_lr() == schedule.get_last_lr() == [0.01 / 9, 0.02 / 9]
    with pytest.raises(RuntimeError, match=r"call engine.step\(\)"):
        optimizer.step()
    engine.destroy()
    optimizer.step()


def case_every_known_optimizer() -> None:
    mesh = Mesh.build()
    steps = regression(3, mesh.dp.size)
    for kind in ELEMENTWISE:
        make = functools.partial(_over, kind)
        expected = plain_loop(mlp(), make, regression_loss, steps)
        engine = engine_for(mlp(), make, mesh, stage=1)
        # Where a gradient is near zero, Rprop and Adam-like first steps follow its sign.
        assert_same(engine_loop(engine, regression_loss, steps), expected, 1e-4)
        engine.destroy()


def _over(kind: type[torch.optim.Optimizer], model: nn.Module) -> torch.optim.Optimizer:
    return kind(model.parameters(), lr=0.01)


def case_several_backward_passes_a_step() -> None:
    """Two losses, each with its backward, before one step; and the boundary said by hand, after the passes."""
    mesh = Mesh.build()
    steps = regression(STEPS, mesh.dp.size * 2)
    for stage in range(3):
        expected = plain_loop(mlp(), sgd, regression_loss, steps)
        engine = engine_for(mlp(), sgd, mesh, stage=stage)
        said = engine_for(mlp(), sgd, mesh, stage=stage)
        for step in steps:
            for batch in step[mesh.dp.rank :: mesh.dp.size]:
                engine.backward(regression_loss(engine, batch) / 2)
                said.set_gradient_accumulation_boundary(False)
                said.backward(regression_loss(said, batch) / 2)
            engine.step()
            said.set_gradient_accumulation_boundary(True)
            said.step()
        for each in (engine, said):
            for name, parameter in each.module_state_dict().items():
                torch.testing.assert_close(parameter, expected.parameters[name], rtol=1e-5, atol=1e-5)
            each.destroy()


def case_no_sync() -> None:
    mesh = Mesh.build()
    steps = regression(STEPS, mesh.dp.size * 2)
    expected = plain_loop(mlp(), sgd, regression_loss, steps)
    engine = engine_for(mlp(), sgd, mesh, stage=1)
    for step in steps:
        first, second = step[mesh.dp.rank :: mesh.dp.size]
        with engine.no_sync():
            engine.backward(regression_loss(engine, first) / 2)
        engine.backward(regression_loss(engine, second) / 2)
        engine.step()
    for name, parameter in engine.module_state_dict().items():
        torch.testing.assert_close(parameter, expected.parameters[name], rtol=1e-5, atol=1e-5)
    engine.destroy()
    engine = engine_for(mlp(), sgd, mesh, stage=2)
    with pytest.raises(RuntimeError, match="stage 2"), engine.no_sync():
        pass
    engine.destroy()


def case_reentrant_checkpointing_of_a_shared_layer() -> None:
    """A layer that is used three times in checkpointed segments gets its gradient in three parts."""

    class Repeated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.inner, self.head = nn.Linear(6, 6), nn.Linear(6, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x.requires_grad_()
            for _ in range(3):
                x = torch.utils.checkpoint.checkpoint(lambda y: torch.tanh(self.inner(y)), x, use_reentrant=True)
            return self.head(x)

    mesh = Mesh.build()
    steps = regression(STEPS, mesh.dp.size)
    expected = plain_loop(Repeated(), sgd, regression_loss, steps)
    for stage in range(3):
        engine = engine_for(Repeated(), sgd, mesh, stage=stage, bucket=1)
        assert_same(engine_loop(engine, regression_loss, steps), expected)
        engine.destroy()


def case_what_is_trained_is_settled() -> None:
    batch = regression(1, 1)[0][0]

    def after_a_pass(stage: int) -> TrainingEngine:
        engine = engine_for(mlp(), sgd, Mesh.build(), stage=stage)
        engine.backward(regression_loss(engine, batch))
        return engine

    for stage in (0, 2):
        engine = after_a_pass(stage)
        engine.module[0].weight.requires_grad_(False)
        with pytest.raises(RuntimeError, match=r"0\.weight was frozen"):
            engine.step()
        engine = after_a_pass(stage)
        engine.module.register_parameter("late", nn.Parameter(torch.zeros(2)))
        with pytest.raises(RuntimeError, match="late came or went"):
            engine.step()
        engine = after_a_pass(stage)
        engine.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
        with pytest.raises(RuntimeError, match="add_param_group"):
            engine.step()


def case_misuse_is_refused() -> None:
    mesh = Mesh.build()
    batch = regression(1, 1)[0][0]
    engine = engine_for(mlp(), sgd, mesh)
    with pytest.raises(RuntimeError, match="without a backward pass"):
        engine.step()
    with pytest.raises(ValueError, match="one number"):
        engine.backward(engine(batch[0]))
    with pytest.raises(RuntimeError, match=r"engine.backward\(loss\)"):
        regression_loss(engine, batch).backward()
    with pytest.raises(ValueError, match="batch is empty: argument 0"):
        engine(batch[0][:0])
    with pytest.raises(AttributeError):
        engine.optimizer_swapper  # noqa: B018
    engine.destroy()
    with pytest.raises(RuntimeError, match="destroyed"):
        engine.backward(regression_loss(engine, batch))
    regression_loss(engine.module, batch).backward()  # a plain module again
    assert all(parameter.grad is not None for parameter in engine.module.parameters())


def case_fragments_tile_every_parameter() -> None:
    """Over the DP ranks every element has one owner; what an owner writes there reaches all ranks."""
    mesh = Mesh.build()
    for stage in (1, 3):
        engine = engine_for(mlp(), sgd, mesh, stage=stage)
        shapes = {name: tuple(t.shape) for name, t in engine.module_state_dict().items()}
        mine = [(f.name, f.start, f.stop) for f in engine.fragments]
        everyone: list[Any] = [None] * mesh.dp.size
        dist.all_gather_object(everyone, mine, group=mesh.dp_process_group)
        for name, shape in shapes.items():
            spans = sorted(span[1:] for each in everyone for span in each if span[0] == name)
            assert [*(start for start, _ in spans), math.prod(shape)] == [0, *(stop for _, stop in spans)], name
        with torch.no_grad():
            for fragment in engine.fragments:
                fragment.tensor.copy_(torch.arange(fragment.start, fragment.stop).view(fragment.tensor.shape))
        engine.refresh_parameters()
        for name, parameter in engine.module_state_dict().items():
            assert torch.equal(parameter.flatten(), torch.arange(parameter.numel()).float()), name
        engine.destroy()


def case_two_engines_of_different_meshes() -> None:
    """In float64, to 1e-12: one cut over the ranks and one beside it that is not."""

    def loss_of(model: Any, batch: Any) -> torch.Tensor:
        return nn.functional.mse_loss(model(batch[0].double()), batch[1].double())

    steps = regression(STEPS, 2)
    split, plain = Mesh.build(2), Mesh.build()
    model = SplitModel(split.tp).double()
    first = engine_for(model, sgd, split, registry=model.registry, stage=1, passes=2)
    second = engine_for(SplitModel().double(), sgd, plain, stage=1)
    cut, whole = engine_loop(first, loss_of, steps), engine_loop(second, loss_of, steps)
    for name, layout in LAYOUTS.items():
        whole.parameters[name] = shard(whole.parameters[name], layout.partition, split.tp.rank, split.tp.size)
    cut.losses, whole.losses = [], []  # those of engine_loop are fp32
    assert_same(cut, whole, 1e-12)
    first.destroy()
    second.destroy()


def case_compiled() -> None:
    mesh = Mesh.build()
    steps = regression(STEPS, mesh.dp.size)
    expected = plain_loop(mlp(), sgd, regression_loss, steps)
    for stage in (1, 3):
        engine = engine_for(mlp(), sgd, mesh, stage=stage)
        engine.compile("aot_eager", {"dynamic": False})
        assert_same(engine_loop(engine, regression_loss, steps), expected)
        engine.destroy()


def case_changes_after_setup_are_refused() -> None:
    mesh = Mesh.build()
    batch = regression(1, 1)[0][0]
    model = mlp()
    model[0].weight.requires_grad_(False)
    engine = engine_for(model, sgd, mesh, stage=1)
    model[0].weight.requires_grad_(True)
    engine.backward(regression_loss(engine, batch))
    with pytest.raises(RuntimeError, match=r"now require a gradient, the first is 0\.weight"):
        engine.step()
    engine.destroy()
    engine = engine_for(model := mlp(), sgd, mesh, stage=1)
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    engine.backward(regression_loss(engine, batch))
    with pytest.raises(RuntimeError, match="has left its bucket"):
        engine.step()
    engine.destroy()
