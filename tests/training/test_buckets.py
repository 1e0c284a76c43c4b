from __future__ import annotations

import torch
from torch import nn

from phalanx.distributed.mesh import Mesh
from phalanx.training.buckets import ALIGN, Bucket, LooseBucket, Slot, plan


def parameters(**shapes: tuple[int, ...]) -> dict[str, nn.Parameter]:
    return {name: nn.Parameter(torch.randn(shape)) for name, shape in shapes.items()}


def test_plan_goes_backwards_and_never_mixes() -> None:
    given = parameters(a=(10,), b=(100,), empty=(0, 5), c=(3, 4), d=(200,), e=(5,))
    given["c"] = nn.Parameter(given["c"].data.double())
    slots = plan(given, partial={"b"}, limit=64 + 10)
    # By hand: e alone (d would not fit), d is larger than the limit, c has its own dtype, b a partial gradient.
    assert [[slot.name for slot in bucket] for bucket in slots] == [["e"], ["d"], ["c"], ["b"], ["a"]]
    (together,) = plan(parameters(a=(10,), b=(7, 2)), partial=set(), limit=1000)
    assert together == [Slot("b", (7, 2), 0), Slot("a", (10,), ALIGN)]


def test_parameters_become_views_that_keep_their_values() -> None:
    given = parameters(a=(10,), b=(7, 2))
    before = {name: parameter.detach().clone() for name, parameter in given.items()}
    objects = dict(given)
    bucket = Bucket(
        plan(given, set(), 1000)[0],
        given,
        Mesh.build(),
        sharded=False,
        partial=False,
        master_dtype=torch.float32,
        param_dtype=torch.bfloat16,
        gradient_dtype=torch.float32,
    )
    for name, parameter in given.items():
        assert parameter is objects[name] and torch.equal(parameter, before[name].bfloat16())
    assert torch.equal(bucket.slots[0].view(bucket.master), before["b"])
    bucket.add(0, torch.ones(7, 2, dtype=torch.bfloat16))
    bucket.add(0, torch.ones(7, 2))
    bucket.launch()
    bucket.collect()
    assert bucket.reduced is not None
    assert torch.equal(bucket.slots[0].view(bucket.reduced), torch.full((7, 2), 2.0))
    assert torch.equal(bucket.slots[1].view(bucket.reduced), torch.zeros(10))
    bucket.master.fill_(3.0)
    bucket.publish()
    assert all(torch.equal(parameter, torch.full_like(parameter, 3.0)) for parameter in given.values())


def test_gradients_that_nobody_adds_to_stay_where_they_are() -> None:
    given = parameters(a=(10,), b=(7, 2))
    dtypes = {"master_dtype": torch.float32, "param_dtype": torch.float32, "gradient_dtype": torch.float32}
    bucket = LooseBucket(plan(given, set(), 1000)[0], given, Mesh.build(), sharded=False, partial=False, **dtypes)
    assert bucket.gradient(0, 14) is None
    first, second = torch.full((7, 2), 2.0), torch.full((7, 2), 3.0)
    bucket.add(0, first)
    bucket.launch()
    bucket.collect()
    found = bucket.gradient(0, 14)
    assert found is not None and found.data_ptr() == first.data_ptr()
    # What no pass has filled counts as zeros; passes add up, summed at once or one by one.
    assert torch.equal(bucket.gradient(ALIGN, ALIGN + 10), torch.zeros(10))
    bucket.add(0, second.clone())
    bucket.add(0, second)
    bucket.launch()
    bucket.collect()
    assert torch.equal(bucket.gradient(0, 14), torch.full((14,), 8.0))
    bucket.discard()
    assert bucket.gradient(0, 14) is None
