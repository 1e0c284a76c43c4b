"""Cases for 2 ranks: a tensor-parallel group that is given different batches or seeds is stopped, on all ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from phalanx.distributed.mesh import Mesh
from phalanx.training.agreement import Agreement
from tests.training.loops import engine_for, regression_loss, sgd


class Taking(nn.Module):
    """Takes its inputs out of the dict that holds them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(6, 3)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return self.layer(batch.pop("x"))


class Toy(nn.Module):
    """Whole on every rank, so that no collective of its own is in the way."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.dropout = nn.Linear(6, 3), nn.Dropout(dropout)

    def forward(self, x: Tensor, **_: Any) -> Tensor:
        return self.layer(self.dropout(x))


def batch(seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, 6, generator=generator), torch.randn(2, 3, generator=generator)


def case_another_batch_on_one_rank() -> None:
    """On the third step, in the second of its passes."""
    mesh = Mesh.build(2)
    model = Toy()
    engine = engine_for(model, sgd, mesh, passes=2)
    for step in range(3):
        weight = model.layer.weight.detach().clone()
        for index in range(2):
            bad = (step, index) == (2, 1) and mesh.tp.rank == 1
            x, y = batch(seed=10 * step + index)
            x = x.flip(1) if bad else x
            engine.backward(regression_loss(engine, (x, y)))
            if (step, index) == (2, 1):
                first = torch.distributed.get_process_group_ranks(mesh.tp_process_group)[0]
                with pytest.raises(
                    RuntimeError, match=rf"argument 0 on ranks \[{first + 1}\] is not what rank {first} got"
                ):
                    engine.step()
                assert torch.equal(model.layer.weight, weight)
                with pytest.raises(RuntimeError, match="without a backward pass"):
                    engine.set_gradient_accumulation_boundary(True)
                    engine.step()
            else:
                engine.step()
    engine.destroy()


def case_what_the_host_knows_is_compared_before_forward() -> None:
    mesh = Mesh.build(2)
    engine = engine_for(Toy(), sgd, mesh)
    odd = mesh.tp.rank == 1
    x, _ = batch()
    for arguments, told in (
        (((x[:1] if odd else x),), r"argument 0: float32 \[1, 6\]"),
        (((x.double() if odd else x),), "float64"),
    ):
        with pytest.raises(RuntimeError, match=told):
            engine(*arguments)
    for keywords, told in (
        ({"scale": 2.0 if odd else 1.0}, r"scale: 2\.0"),
        ({"more": [x] if odd else []}, "more: list of 1"),
        ({"mask": x} if odd else {"masks": x}, "mask: float32"),
    ):
        with pytest.raises(RuntimeError, match=told):
            engine(x, **keywords)
    with pytest.raises(ValueError, match=r"the batch is empty: argument 0 is float32 \[0, 6\]"):
        engine(x[:0])
    engine.destroy()


def case_another_seed_on_one_rank() -> None:
    mesh = Mesh.build(2)
    x, _ = batch()
    for rate in (0.0, 0.5):
        engine = engine_for(Toy(rate), sgd, mesh)
        torch.manual_seed(mesh.tp.rank)
        engine.eval()(x)
        engine.train()
        if rate:
            with pytest.raises(RuntimeError, match="random generators differ"):
                engine(x)
            torch.manual_seed(5)
        engine(x)
        engine.destroy()


def case_nested_inputs_and_fingerprints() -> None:
    """A swap of two elements, another bit of a zero, another last element: each is another batch."""
    mesh = Mesh.build(2)
    agreement = Agreement(Toy(), mesh)
    ids = torch.arange(12).view(3, 4)
    swapped = ids.flatten()[[1, 0, *range(2, 12)]].view(3, 4)
    pairs = [
        (ids, swapped),
        (ids, torch.cat([ids.flatten()[:-1], torch.tensor([99])]).view(3, 4)),
        (torch.zeros(3), torch.tensor([0.0, -0.0, 0.0])),
        (torch.zeros(3, dtype=torch.bool), torch.tensor([False, False, True])),
        (torch.zeros(2, dtype=torch.bfloat16), torch.tensor([0, 1], dtype=torch.bfloat16)),
    ]
    for good, bad in pairs:
        for other in (good, bad if mesh.tp.rank == 1 else good):
            agreement.before_update()
            agreement.after_forward(agreement.before_forward((), {"batch": {"parts": [good, other]}}))
        with pytest.raises(RuntimeError, match=r"batch\['parts'\]\[1\] on ranks"):
            agreement.before_update()
    agreement.close()


def case_of_several_passes_any_may_differ() -> None:
    """The first of three, as well as one whose inputs have another name; what was found is found once."""
    mesh = Mesh.build(2)
    agreement = Agreement(Toy(), mesh)
    good = torch.zeros(3)
    bad = torch.ones(3) if mesh.tp.rank == 1 else good
    for batches in ([{"x": bad}, {"x": good}, {"x": good}], [{"y": bad}, {"x": good}, {"x": good}]):
        for each in batches:
            agreement.after_forward(agreement.before_forward((), each))
        with pytest.raises(RuntimeError, match="inputs differ"):
            agreement.before_update()
        agreement.before_update()
    agreement.close()


def case_other_batches_modes_and_forwards_are_found_at_once() -> None:
    """In evaluation no update comes that would compare the batches; a mode or a forward too many hangs otherwise."""
    mesh = Mesh.build(2)
    odd = mesh.tp.rank == 1
    engine = engine_for(Toy(), sgd, mesh)
    x, _ = batch()
    engine.eval()
    with torch.no_grad(), pytest.raises(RuntimeError, match="argument 0 on ranks"):
        engine(x.flip(1) if odd else x)
    engine.train(not odd)
    with pytest.raises(RuntimeError, match="in evaluation mode"):
        engine(x)
    engine.train()
    if odd:
        engine._agreement._forwards += 1
    with pytest.raises(RuntimeError, match=r"rank \d has 'forward \d"):
        engine(x)
    engine.destroy()


def case_a_model_that_takes_its_inputs_out_of_their_dict() -> None:
    mesh = Mesh.build(2)
    engine = engine_for(Taking(), sgd, mesh)
    engine.backward(engine({"x": batch(seed=mesh.tp.rank)[0]}).sum())
    with pytest.raises(RuntimeError, match=r"argument 0\['x'\] on ranks"):
        engine.step()
    engine.destroy()
