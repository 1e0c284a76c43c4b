"""The same training run twice: by the engine on ranks, and by a plain torch loop in one process on the whole batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.distributed.mesh import Mesh
from phalanx.parallel.registry import LayoutRegistry
from phalanx.training.config import TrainingConfig
from phalanx.training.engine import TrainingEngine

MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]
LossOf = Callable[[Any, Any], Tensor]


@dataclass
class Run:
    """What a training run leaves behind. `losses` are means over the whole batch of each step."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    parameters: dict[str, Tensor] = field(default_factory=dict)


def mlp(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 17), nn.Tanh(), nn.Linear(17, 17), nn.Tanh(), nn.Linear(17, 3))


def regression(steps: int, micro_batches: int, size: int = 2) -> list[list[tuple[Tensor, Tensor]]]:
    """For each step, micro-batches of inputs [size, 6] and targets [size, 3]."""
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randn(steps, micro_batches, size, width, generator=generator) for width in (6, 3))
    return [list(zip(*step, strict=True)) for step in zip(x, y, strict=True)]


def regression_loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.mse_loss(model(batch[0]).float(), batch[1])


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def adamw_in_groups(model: nn.Module) -> torch.optim.Optimizer:
    """Weight decay on matrices only, another rate for vectors."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim <= 1]
    return torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "lr": 0.02, "weight_decay": 0.0}], lr=0.01
    )


def plain_loop(
    model: nn.Module,
    make_optimizer: MakeOptimizer,
    loss_of: LossOf,
    steps: Sequence[Sequence[Any]],
    *,
    clip: float = 0.0,
    scheduler: Callable[[torch.optim.Optimizer], Any] | None = None,
) -> Run:
    """One process, torch alone: the mean of the micro-batches' losses is the loss of a step."""
    run = Run()
    optimizer = make_optimizer(model)
    schedule = scheduler(optimizer) if scheduler else None
    for micro_batches in steps:
        loss = torch.stack([loss_of(model, batch) for batch in micro_batches]).mean()
        loss.backward()
        for parameter in model.parameters():
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        held = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
        run.norms.append(float(nn.utils.clip_grad_norm_(held, clip or float("inf"))))
        run.losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        if schedule:
            schedule.step()
    run.parameters = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    return run


def settings(mesh: Mesh, *, stage: int = 0, passes: int = 1, clip: float = 0.0, **more: Any) -> TrainingConfig:
    return TrainingConfig.read(
        {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": passes,
            "gradient_clipping": clip,
            "zero_optimization": {"stage": stage, "reduce_bucket_size": more.pop("bucket", 200)},
            "tensor_parallel": {"autotp_size": mesh.tp.size},
            **more,
        },
        world_size=mesh.tp.size * mesh.dp.size,
    )


def engine_for(
    model: nn.Module,
    make_optimizer: MakeOptimizer | None,
    mesh: Mesh,
    *,
    registry: LayoutRegistry | None = None,
    scheduler: Callable[[torch.optim.Optimizer], Any] | None = None,
    **options: Any,
) -> TrainingEngine:
    optimizer = make_optimizer(model) if make_optimizer else None
    return TrainingEngine(
        model,
        config=settings(mesh, **options),
        mesh=mesh,
        registry=registry or LayoutRegistry.whole(model),
        optimizer=optimizer,
        lr_scheduler=scheduler(optimizer) if scheduler and optimizer else None,
    )


def engine_loop(engine: TrainingEngine, loss_of: LossOf, steps: Sequence[Sequence[Any]]) -> Run:
    """DP rank r of d takes micro-batches r, r + d, ... of each step."""
    run = Run()
    dp = engine.mesh.dp
    for micro_batches in steps:
        losses = []
        for batch in micro_batches[dp.rank :: dp.size]:
            loss = loss_of(engine, batch)
            engine.backward(loss)
            engine.step()
            losses.append(loss.detach().float())
        run.losses.append(float(dp.all_reduce(torch.stack(losses).mean().double())) / dp.size)
        run.norms.append(engine.get_global_grad_norm())
    run.parameters = {name: t.detach().clone() for name, t in engine.module_state_dict().items()}
    return run


def assert_same(got: Run, expected: Run, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(got.losses, expected.losses, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(got.norms, expected.norms, rtol=tolerance, atol=tolerance)
    for name, parameter in expected.parameters.items():
        difference = (got.parameters[name] - parameter).abs().max()
        assert difference <= tolerance * (1 + parameter.abs().max()), f"{name} is off by {difference}"
