"""Cases for 2 ranks at ZeRO stage 3, and of a Llama at every stage."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from phalanx.distributed.mesh import Mesh
from phalanx.layout import shard
from phalanx.parallel.parallelize import parallelize
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


def llama(seed: int = 0, tied: bool = False) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=37,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            tie_word_embeddings=tied,
            max_position_embeddings=32,
            use_cache=False,
        )
    )


def token_steps(steps: int, micro_batches: int) -> list[list[Tensor]]:
    """Micro-batches of token ids [2, 7]."""
    ids = torch.randint(37, (steps, micro_batches, 2, 7), generator=torch.Generator().manual_seed(2))
    return [list(step) for step in ids]


def language_loss(model: Any, ids: Tensor) -> Tensor:
    return model(input_ids=ids, labels=ids).loss


def case_stage_3() -> None:
    mesh = Mesh.build()
    for make, passes, clip in ((sgd, 1, 0.0), (adamw_in_groups, 1, 0.1), (adamw_in_groups, 4, 0.5)):
        steps = regression(STEPS, mesh.dp.size * passes)
        expected = plain_loop(mlp(), make, regression_loss, steps, clip=clip)
        engine = engine_for(mlp(seed=mesh.dp.rank), make, mesh, stage=3, passes=passes, clip=clip)
        assert_same(engine_loop(engine, regression_loss, steps), expected)
        engine.destroy()


def case_stage_3_of_a_cut_model() -> None:
    for tp in {2, dist.get_world_size()}:
        mesh = Mesh.build(tp)
        steps = regression(STEPS, mesh.dp.size)
        expected = plain_loop(SplitModel(), adamw_in_groups, regression_loss, steps, clip=0.3)
        model = SplitModel(mesh.tp)
        engine = engine_for(model, adamw_in_groups, mesh, registry=model.registry, stage=3, clip=0.3)
        run = engine_loop(engine, regression_loss, steps)
        for name, layout in LAYOUTS.items():
            whole = expected.parameters[name]
            expected.parameters[name] = shard(whole, layout.partition, mesh.tp.rank, mesh.tp.size)
        assert_same(run, expected)
        engine.destroy()


def case_llama_at_every_stage() -> None:
    mesh = Mesh.build()
    for tied in (False, True):
        steps = token_steps(4 if tied else STEPS, mesh.dp.size * 2)
        expected = plain_loop(llama(tied=tied), adamw_in_groups, language_loss, steps, clip=0.5)
        for stage in range(4):
            engine = engine_for(
                llama(seed=mesh.dp.rank, tied=tied),
                adamw_in_groups,
                mesh,
                stage=stage,
                passes=2,
                clip=0.5,
                bucket=4000,
            )
            assert_same(engine_loop(engine, language_loss, steps), expected)
            engine.destroy()


def case_evaluation_between_backward_and_step() -> None:
    mesh = Mesh.build()
    steps = regression(STEPS, mesh.dp.size)
    expected = plain_loop(mlp(), sgd, regression_loss, steps)
    for stage in (1, 3):
        engine = engine_for(mlp(), sgd, mesh, stage=stage)
        losses = []
        for step in steps:
            batch = step[mesh.dp.rank]
            loss = regression_loss(engine, batch)
            engine.backward(loss)
            with torch.no_grad():
                torch.testing.assert_close(regression_loss(engine.eval(), batch), loss.detach())
            engine.train().step()
            losses.append(float(mesh.dp.all_reduce(loss.detach().clone())) / mesh.dp.size)
        torch.testing.assert_close(losses, expected.losses, rtol=1e-5, atol=1e-5)
        engine.destroy()


def case_stage_3_in_bf16() -> None:
    """Against stage 1, which sums in bf16 where stage 3 sums in fp32."""
    mesh = Mesh.build()
    steps = token_steps(STEPS, mesh.dp.size)
    runs = []
    for stage in (1, 3):
        more = {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
        engine = engine_for(llama(), adamw_in_groups, mesh, stage=stage, clip=0.5, **more)
        runs.append(engine_loop(engine, language_loss, steps))
        assert all(fragment.tensor.dtype == torch.float32 for fragment in engine.fragments)
        assert all(t.dtype == torch.bfloat16 for t in runs[-1].parameters.values())
        engine.destroy()
    assert_same(runs[1], runs[0], 1e-2)


def case_stage_3_unused_and_frozen() -> None:
    class Branches(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first, self.never, self.frozen, self.head = (torch.nn.Linear(6, n) for n in (6, 6, 6, 3))
            self.frozen.requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.frozen(torch.tanh(self.first(x))))

    mesh = Mesh.build()
    steps = regression(STEPS, mesh.dp.size)
    expected = plain_loop(Branches(), adamw_in_groups, regression_loss, steps, clip=0.5)
    engine = engine_for(Branches(), adamw_in_groups, mesh, stage=3, clip=0.5)
    assert_same(engine_loop(engine, regression_loss, steps), expected)
    engine.destroy()


def case_dropout_in_a_cut_model() -> None:
    """Masks differ inside the regions; the common random state stays common, so the check of seeds never fires."""
    mesh = Mesh.build(2)
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=37,
            hidden_size=24,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=6,
            num_key_value_heads=3,
            head_dim=4,
            attention_dropout=0.2,
            use_cache=False,
        )
    )
    registry = parallelize(model, mesh, sum_gradients=False)
    engine = engine_for(model, sgd, mesh, registry=registry, stage=1, passes=2)
    run = engine_loop(engine, language_loss, token_steps(4, 2))
    assert all(0 < norm < 100 for norm in run.norms)
    engine.destroy()


def case_sequence_parallel() -> None:
    """The norms' gradients are partial: each rank sees its share of the tokens."""
    mesh = Mesh.build(2)
    steps = [[ids[:, :6] for ids in step] for step in token_steps(4, 2)]
    whole = plain_loop(llama(), adamw_in_groups, language_loss, steps, clip=0.5)
    for stage in (0, 2):
        model = llama()
        registry = parallelize(model, mesh, sum_gradients=False, sequence_parallel=True)
        assert any(layout.partial for layout in registry.values())
        engine = engine_for(model, adamw_in_groups, mesh, registry=registry, stage=stage, passes=2, clip=0.5)
        parameters = {
            name: shard(parameter, registry[name].partition, mesh.tp.rank, mesh.tp.size)
            for name, parameter in whole.parameters.items()
        }
        assert_same(engine_loop(engine, language_loss, steps), dataclasses.replace(whole, parameters=parameters))
        engine.destroy()


class Nested(nn.Module):
    """Blocks in lists of lists."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        one, two, three = (nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3))
        self.stages = nn.ModuleList([nn.ModuleList([one, two]), nn.ModuleList([three])])
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        for stage in self.stages:
            for block in stage:  # type: ignore[attr-defined]
                x = block(x)
        return self.head(x)


def case_blocks_in_lists_of_lists() -> None:
    mesh = Mesh.build()
    steps = regression(STEPS, mesh.dp.size)
    for compiled in (False, True):
        model = Nested()
        expected = plain_loop(Nested(), sgd, regression_loss, steps)
        engine = engine_for(model, sgd, mesh, stage=3)
        if compiled:
            engine.compile("aot_eager")
            blocks = [block for stage in model.stages for block in stage]  # type: ignore[attr-defined]
            assert all(block._compiled_call_impl is not None for block in blocks)
        assert_same(engine_loop(engine, regression_loss, steps), expected)
        engine.destroy()
