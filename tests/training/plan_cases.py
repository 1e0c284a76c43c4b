"""Cases for 2 ranks that see different data: a plan's bytes are those of the tensors that they hold."""

from __future__ import annotations

import torch
import torch.distributed as dist

from phalanx.distributed.mesh import Mesh
from phalanx.parallel.plan import hollow_model
from phalanx.parallel.registry import LayoutRegistry
from phalanx.training.plan import plan_settings, plan_training
from phalanx.training.precision import Precision
from phalanx.training.setup import shard
from tests.parallel.models import tiny_config, tiny_model


def case_what_a_plan_says_of_sharded_state() -> None:
    for stage in (0, 1, 2, 3):
        for dtype in ("bfloat16", "float32"):
            settings = plan_settings(tp_size=1, dp_size=2, stage=stage, dtype=dtype)
            planned = plan_training(hollow_model(tiny_config("llama")), settings).memory[0]
            model, mesh = tiny_model("llama").float(), Mesh.build(1)
            shards = shard(
                model,
                dict(model.named_parameters()),
                config=settings,
                mesh=mesh,
                registry=LayoutRegistry.whole(model),
                precision=Precision.of(settings),
            )
            shards.begin(reduce=True)
            ids = torch.randint(0, 100, (2, 5))
            model(input_ids=ids, labels=ids).loss.backward()
            shards.end()
            shards.finish()
            tensors = [fragment.tensor for fragment in shards.fragments]
            optimizer = torch.optim.AdamW(tensors, foreach=False)
            optimizer.step()
            state = [v for state in optimizer.state.values() for v in state.values() if v.dim()]
            held = torch.tensor(
                [
                    sum(each.grad.nbytes for each in tensors if each.grad is not None),
                    0 if dtype == "float32" else sum(each.nbytes for each in tensors),
                    sum(each.nbytes for each in state),
                ]
            )
            # Ranks share unevenly where buckets end between parameters: their sum is exact.
            dist.all_reduce(held)
            expected = [2 * each for each in (planned.gradients, planned.masters, planned.moments)]
            assert held.tolist() == expected, (stage, dtype, held.tolist(), expected)
