"""Every family, cut and sharded in every way: the losses, gradient norms and weights of 8 steps of one process.

Rows of factors come from `pairwise`; one case is one row.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import phalanx
from phalanx.layout import local_shape, merge
from tests.parallel.models import tiny_model
from tests.training.loops import engine_loop, plain_loop
from tests.training.pairwise import Row, pairwise

STEPS = 8
FACTORS: dict[str, list[Any]] = {
    "family": [
        "llama",
        "qwen2",
        "qwen3",
        "gpt_neox",
        "phi3",
        "falcon_grouped",
        "falcon_multi_query",
        "falcon_head_major",
        "bloom",
        "opt",
        "phi",
        "gpt2",
        "gpt_bigcode",
        "mixtral",
        "gemma2",
        "qwen3_moe",
    ],
    "tp": [2, 4],
    "stage": [0, 1, 2, 3],
    "passes": [1, 4],
    "clip": [0.0, 0.5],
    "sequence_parallel": [False, True],
    "overlap": [False, True],
    "chunk": [0, 5],
    "kv_heads": [None, 1, 2, 3],
    "vocab_size": [103, 1003],
    "tied": [None, False, True],
}
_KV_NAMES = {"falcon_grouped": "num_kv_heads"}
_FIXED_KV = ("gpt_neox", "falcon_multi_query", "falcon_head_major", "bloom", "opt", "gpt2", "gpt_bigcode", "phi")


def possible(row: Row) -> bool:
    family, kv = row.get("family"), row.get("kv_heads")
    if family in _FIXED_KV and kv is not None:
        return False
    # Their logits are capped or copied between head and loss.
    if family in ("gemma2", "opt") and row.get("chunk"):
        return False
    # A grouped projection with as many or one KV head is another layout.
    return not (family == "falcon_grouped" and kv in (None, 1))


def build(row: Row) -> nn.Module:
    changes: dict[str, Any] = {"vocab_size": row["vocab_size"]}
    if row["tied"] is not None:
        changes["tie_word_embeddings"] = row["tied"]
    kv = row["kv_heads"]
    if kv is not None:
        heads = 6 if kv == 3 else 4
        changes |= {_KV_NAMES.get(row["family"], "num_key_value_heads"): kv, "num_attention_heads": heads}
        changes["hidden_size"] = 8 * heads
    return tiny_model(row["family"], dtype=torch.float32, **changes)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05)


def language_loss(model: Any, batch: Tensor) -> Tensor:
    loss: Tensor = model(input_ids=batch, labels=batch).loss
    return loss


def token_steps(vocab_size: int, micro_batches: int) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(0, vocab_size, (STEPS, micro_batches, 2, 7), generator=generator)
    return [list(step) for step in tokens]


def check(row: Row) -> None:
    world = dist.get_world_size()
    dp = world // row["tp"]
    steps = token_steps(row["vocab_size"], row["passes"] * dp)
    # On one rank only: on few cores, all of them at once take as many times as long.
    found: list[Any] = (
        [plain_loop(build(row), sgd, language_loss, steps, clip=row["clip"])] if dist.get_rank() == 0 else [None]
    )
    dist.broadcast_object_list(found)
    expected = found[0]
    model = build(row)
    optimizer = sgd(model)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": row["passes"],
        "gradient_clipping": row["clip"],
        "zero_optimization": {"stage": row["stage"], "reduce_bucket_size": 3000},
        # Plain SGD has no state to shard; DeepSpeed wants this said.
        "zero_allow_untested_optimizer": True,
        "chunked_head": row["chunk"],
        "tensor_parallel": {
            "autotp_size": row["tp"],
            "sequence_parallel": row["sequence_parallel"],
            "tp_overlap_comm": row["overlap"],
        },
    }
    engine, _, _, _ = phalanx.initialize(model=model, optimizer=optimizer, config=config)
    got = engine_loop(engine, language_loss, steps)
    torch.testing.assert_close(got.losses, expected.losses, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(got.norms, expected.norms, rtol=1e-5, atol=1e-6)
    tp, registry = engine.mesh.tp, engine.registry
    for name, whole in expected.parameters.items():
        part = got.parameters[name]
        layout = registry[name]
        flat = part.reshape(-1)
        if layout.partition.kind == "replicate":
            both = tp.all_gather(flat[None].contiguous())
            assert bool((both == both[:1]).all()), f"{name} differs between the ranks of a TP group"
            joined = part
        else:
            counts = tp.all_gather(torch.tensor([flat.numel()])).tolist()
            parts = tp.all_gather(flat.contiguous(), 0, counts).split(counts)
            shapes = [local_shape(layout.partition, layout.shape, r, tp.size) for r in range(tp.size)]
            joined = merge([p.view(s) for p, s in zip(parts, shapes, strict=True)], layout.partition, layout.shape)
        assert (joined - whole).norm() <= 1e-5 * whole.norm() + 1e-7, f"{name} is off after {STEPS} steps"
    engine.destroy()
    # Each row makes groups, with threads of their own. PyTorch's DTensor remembers those of FSDP by name.
    if row["stage"] < 3:
        engine.mesh.close()


def rows(world: int) -> list[Row]:
    tps = [tp for tp in FACTORS["tp"] if tp <= world]
    return pairwise({**FACTORS, "tp": tps}, possible)


def full_rows(world: int, family: str = "llama") -> list[Row]:
    tps = [tp for tp in FACTORS["tp"] if tp <= world]
    factors = {**FACTORS, "family": [family], "tp": tps, "kv_heads": [1, 2, 3], "tied": [False, True]}
    factors |= {"overlap": [False], "chunk": [0]}
    values = itertools.product(*factors.values())
    return [dict(zip(factors, each, strict=True)) for each in values]


def title(row: Row) -> str:
    return " ".join(f"{name}={value}" for name, value in row.items())


def of_rows(chosen: list[Row]) -> dict[str, Callable[[], None]]:
    return {title(row): partial(check, row) for row in chosen}


def cases(world: int) -> dict[str, Callable[[], None]]:
    """Some of the rows that hold every pair of factors: all of them take their time on few cores."""
    return of_rows(rows(world)[:: 2 if world == 2 else 3])
