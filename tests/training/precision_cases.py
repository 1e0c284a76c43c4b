"""Cases for 2 ranks: 16-bit parameters with fp32 master weights, and the fp16 loss scale."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from phalanx.distributed.mesh import Mesh
from tests.training.loops import (
    Run,
    adamw_in_groups,
    assert_same,
    engine_for,
    engine_loop,
    mlp,
    regression,
    sgd,
)
from tests.training.split_model import LAYOUTS, SplitModel

STEPS = 8


def _loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    dtype = next(getattr(model, "module", model).parameters()).dtype
    return nn.functional.mse_loss(model(batch[0].to(dtype)).float(), batch[1])


def _master_loop(
    make_optimizer: Any, steps: Any, dtype: torch.dtype, *, ranks: int, passes: int, clip: float, sum_in: torch.dtype
) -> Run:
    """Mixed precision by hand: parameters are `dtype` copies of fp32 masters, gradients are summed in `sum_in`."""
    run = Run()
    master, model = mlp(), mlp().to(dtype)
    optimizer = make_optimizer(master)
    for micro_batches in steps:
        with torch.no_grad():
            for low, high in zip(model.parameters(), master.parameters(), strict=True):
                low.copy_(high)
        sums = [torch.zeros_like(p, dtype=sum_in) for p in model.parameters()]
        losses = []
        for batch in micro_batches:
            loss = _loss(model, batch)
            for total, g in zip(sums, torch.autograd.grad(loss / passes, list(model.parameters())), strict=True):
                total += g
            losses.append(loss.item())
        for parameter, total in zip(master.parameters(), sums, strict=True):
            parameter.grad = total.float() / ranks
        run.norms.append(float(nn.utils.clip_grad_norm_(master.parameters(), clip or float("inf"))))
        run.losses.append(sum(losses) / len(losses))
        optimizer.step()
    run.parameters = {name: p.detach().to(dtype) for name, p in master.named_parameters()}
    return run


def case_bf16_keeps_fp32_masters() -> None:
    mesh = Mesh.build()
    for stage in range(3):
        for passes, sum_in in ((1, torch.bfloat16), (4, torch.float32)):
            if (passes == 1 and mesh.dp.size > 2) or (stage == 2 and passes > 1):
                continue  # sums of several bf16 numbers depend on their order
            steps = regression(STEPS, mesh.dp.size * passes)
            options: dict[str, Any] = {"ranks": mesh.dp.size, "passes": passes, "clip": 0.5, "sum_in": sum_in}
            expected = _master_loop(adamw_in_groups, steps, torch.bfloat16, **options)
            engine = engine_for(
                mlp(), adamw_in_groups, mesh, stage=stage, passes=passes, clip=0.5, bf16={"enabled": True}
            )
            assert_same(engine_loop(engine, _loss, steps), expected)
            assert all(fragment.tensor.dtype == torch.float32 for fragment in engine.fragments)
            assert all(parameter.dtype == torch.bfloat16 for parameter in engine.module.parameters())
            engine.destroy()


def case_bf16_stage_2_sums_in_fp32() -> None:
    """Each pass is summed over the ranks in bf16, passes are added up in fp32."""
    mesh = Mesh.build()
    steps = regression(STEPS, mesh.dp.size * 4)
    options: dict[str, Any] = {"ranks": mesh.dp.size, "passes": 4, "clip": 0.5, "sum_in": torch.float32}
    expected = _master_loop(adamw_in_groups, steps, torch.bfloat16, **options)
    engine = engine_for(mlp(), adamw_in_groups, mesh, stage=2, passes=4, clip=0.5, bf16={"enabled": True})
    run = engine_loop(engine, _loss, steps)
    torch.testing.assert_close(run.losses, expected.losses, rtol=5e-3, atol=5e-3)
    torch.testing.assert_close(run.norms, expected.norms, rtol=5e-3, atol=5e-3)
    engine.destroy()


def case_bf16_gradients_in_the_dtype_that_is_asked_for() -> None:
    mesh = Mesh.build()
    if mesh.dp.size > 2:
        return
    steps = regression(STEPS, mesh.dp.size)
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        expected = _master_loop(sgd, steps, torch.bfloat16, ranks=mesh.dp.size, passes=1, clip=0.0, sum_in=dtype)
        more = {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": name}}
        engine = engine_for(mlp(), sgd, mesh, stage=1, **more)
        assert_same(engine_loop(engine, _loss, steps), expected)
        engine.destroy()


def case_buffers_and_frozen_parameters() -> None:
    class Frozen(nn.Module):
        def __init__(self, seed: int) -> None:
            super().__init__()
            torch.manual_seed(seed)
            self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 3)
            self.first.requires_grad_(False)
            self.register_buffer("scale", torch.randn(6))

    mesh = Mesh.build()
    model = Frozen(seed=mesh.dp.rank)
    engine = engine_for(model, sgd, mesh, stage=1, bf16={"enabled": True})
    first = Frozen(seed=0)
    assert (model.first.weight.dtype, model.last.weight.dtype, model.scale.dtype) == (
        torch.bfloat16,
        torch.bfloat16,
        torch.float32,
    )
    for name, tensor in first.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor.to(model.state_dict()[name].dtype)), name
    engine.destroy()


def case_16_bit_parameters_need_to_be_enabled() -> None:
    with pytest.raises(ValueError, match="neither bf16 nor fp16"):
        engine_for(mlp().bfloat16(), sgd, Mesh.build())


def case_fp16_static_scale_cancels() -> None:
    mesh = Mesh.build()
    steps = regression(STEPS, mesh.dp.size * 4)
    options: dict[str, Any] = {"ranks": mesh.dp.size, "passes": 4, "clip": 0.5, "sum_in": torch.float32}
    expected = _master_loop(sgd, steps, torch.float16, **options)
    fp16 = {"enabled": True, "loss_scale": 128}
    engine = engine_for(mlp(), sgd, mesh, stage=1, passes=4, clip=0.5, fp16=fp16)
    run = engine_loop(engine, _loss, steps)
    # The scale moves which small gradients an fp16 number can tell from zero.
    torch.testing.assert_close(run.losses, expected.losses, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(run.norms, expected.norms, rtol=1e-3, atol=1e-3)
    assert engine.loss_scale == 128
    engine.destroy()


def overflowing(mesh: Mesh, model: nn.Module, registry: Any, bad_rank: bool, stage: int = 1) -> None:
    """A step in which one rank's gradient is infinite is skipped by all of them, and the scale falls."""
    fp16 = {"enabled": True, "initial_scale_power": 4, "hysteresis": 1, "loss_scale_window": 2}
    schedules: list[Any] = []

    def scheduler(optimizer: torch.optim.Optimizer) -> Any:
        schedules.append(torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)))
        return schedules[0]

    engine = engine_for(model, adamw_in_groups, mesh, registry=registry, stage=stage, fp16=fp16, scheduler=scheduler)
    seen = []
    for step, ((x, y),) in enumerate(regression(6, 1)):
        before = {name: t.clone() for name, t in engine.module_state_dict().items()}
        loss = nn.functional.mse_loss(engine(x.half()).float(), y)
        engine.backward(loss * (1e9 if step == 2 and bad_rank else 1.0))
        engine.step()
        moved = any(not torch.equal(before[name], t) for name, t in engine.module_state_dict().items())
        assert moved == engine.was_step_applied()
        seen.append((engine.loss_scale, engine.was_step_applied()))
    # By hand, after DeepSpeed's rule: doubled when (step - last overflow) is a multiple of 2, halved at the overflow.
    assert seen == [(16, True), (32, True), (16, False), (16, True), (32, True), (32, True)]
    assert (engine.global_steps, engine.skipped_steps, schedules[0].last_epoch) == (6, 1, 5)
    engine.destroy()


def case_fp16_overflow_on_one_data_parallel_rank() -> None:
    mesh = Mesh.build()
    for stage in range(4):
        overflowing(mesh, mlp(), None, bad_rank=mesh.dp.rank == 1, stage=stage)


def case_fp16_overflow_in_a_tensor_parallel_group() -> None:
    """Only one rank's shard overflows: the loss of that rank alone is made huge."""
    mesh = Mesh.build(2)
    model = SplitModel(mesh.tp)
    assert set(LAYOUTS) == {name for name, _ in model.named_parameters()}
    overflowing(mesh, model, model.registry, bad_rank=mesh.tp.rank == 1 and mesh.dp.rank == 0)
