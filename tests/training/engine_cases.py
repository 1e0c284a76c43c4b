"""Cases for 2 and 4 ranks: what the engine trains is what a plain torch loop trains."""

from __future__ import annotations

from typing import Any

from phalanx.distributed.mesh import Mesh
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

STEPS = 8


def _check_mlp(make_optimizer: Any, *, passes: int = 1, clip: float = 0.0, **options: Any) -> None:
    mesh = Mesh.build()
    steps = regression(STEPS, mesh.dp.size * passes)
    expected = plain_loop(mlp(), make_optimizer, regression_loss, steps, clip=clip)
    engine = engine_for(mlp(seed=mesh.dp.rank), make_optimizer, mesh, passes=passes, clip=clip, **options)
    assert_same(engine_loop(engine, regression_loss, steps), expected)
    assert engine.global_steps == STEPS
    engine.destroy()


def case_sgd_at_every_stage() -> None:
    for stage in range(3):
        _check_mlp(sgd, stage=stage)


def case_adamw_in_groups_clipped() -> None:
    for stage in range(3):
        _check_mlp(adamw_in_groups, stage=stage, clip=0.1)


def case_accumulation() -> None:
    for stage in range(3):
        _check_mlp(adamw_in_groups, stage=stage, passes=4, clip=0.5)


def case_one_large_and_many_tiny_buckets() -> None:
    _check_mlp(sgd, stage=1, bucket=10**9)
    _check_mlp(sgd, stage=2, bucket=1)
