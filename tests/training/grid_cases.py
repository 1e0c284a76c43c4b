"""Cases for 4 ranks: tensor parallelism of 2 beside data parallelism of 2, and data parallelism of 4."""

from __future__ import annotations

import dataclasses

import torch
import torch.distributed as dist
from transformers import Qwen3Config, Qwen3ForCausalLM

from phalanx.distributed.mesh import Mesh
from phalanx.layout import shard
from phalanx.parallel.parallelize import parallelize
from tests.training.engine_cases import check_mlp, check_split
from tests.training.loops import adamw_in_groups, assert_same, engine_for, engine_loop, plain_loop
from tests.training.precision_cases import overflowing
from tests.training.sharded_cases import language_loss, token_steps
from tests.training.split_model import SplitModel


def grid_data_parallel() -> None:
    check_mlp(adamw_in_groups, stage=2, passes=2, clip=0.5)
    check_mlp(adamw_in_groups, stage=3, clip=0.5)


def grid_cut_by_hand() -> None:
    for stage in range(4):
        check_split(2, stage=stage, clip=0.3)
    check_split(2, stage=1, passes=4, clip=0.3)


def grid_all_ranks_in_one_tensor_parallel_group() -> None:
    check_split(4, stage=2, clip=0.3)


def qwen3() -> Qwen3ForCausalLM:
    """Three KV heads, so that two ranks hold unequal shares, and q/k norms, whose gradients are partial."""
    torch.manual_seed(0)
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=37,
            hidden_size=16,
            intermediate_size=25,
            num_hidden_layers=2,
            num_attention_heads=6,
            num_key_value_heads=3,
            head_dim=4,
            tie_word_embeddings=True,
            max_position_embeddings=32,
            use_cache=False,
        )
    )


def grid_qwen3_with_uneven_heads() -> None:
    for tp, stages in ((2, (0, 1, 3)), (4, (0,))):
        mesh = Mesh.build(tp)
        steps = token_steps(4, mesh.dp.size)
        whole = plain_loop(qwen3(), adamw_in_groups, language_loss, steps, clip=0.5)
        for stage in stages:
            model = qwen3()
            registry = parallelize(model, mesh, sum_gradients=False)
            engine = engine_for(model, adamw_in_groups, mesh, registry=registry, stage=stage, clip=0.5)
            parameters = {
                name: shard(parameter, registry[name].partition, mesh.tp.rank, mesh.tp.size)
                for name, parameter in whole.parameters.items()
            }
            assert_same(engine_loop(engine, language_loss, steps), dataclasses.replace(whole, parameters=parameters))
            engine.destroy()


def grid_fp16_overflow_on_one_rank() -> None:
    mesh = Mesh.build(2)
    model = SplitModel(mesh.tp)
    overflowing(mesh, model, model.registry, bad_rank=dist.get_rank() == 3)
