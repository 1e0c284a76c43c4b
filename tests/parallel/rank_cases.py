"""What needs real processes: compiled models, and random numbers, which threads would share. Run under torchrun."""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from phalanx.distributed.mesh import Mesh
from phalanx.parallel import parallelize
from tests.parallel.models import batch, tiny_model


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def compiled(name: str, **options: Any) -> str:
    model = tiny_model(name, dtype=torch.float32)
    inputs = {k: v for k, v in batch(103).items() if k != "attention_mask"}
    parallelize(model, Mesh.build(2), **options)
    loss = model(**inputs).loss
    loss.backward()
    expected = gradients(model)
    model.zero_grad()
    torch._dynamo.reset()
    again = torch.compile(model, backend="aot_eager", fullgraph=True)(**inputs).loss
    again.backward()
    torch.testing.assert_close(again, loss)
    for key, grad in gradients(model).items():
        torch.testing.assert_close(grad, expected[key], rtol=1e-5, atol=1e-6)
    return "ok"


def dropout(name: str, drops: dict[str, float], **options: Any) -> str:
    """Residual dropout is the same on all ranks, attention dropout is not; recomputing draws the same numbers again."""
    mesh = Mesh.build(2)
    model = tiny_model(name, dtype=torch.float32, **drops)
    registry = parallelize(model, mesh, sum_gradients=True, **options)
    inputs = batch(103)
    results = []
    for checkpointing in (False, True):
        again = model
        if checkpointing:
            again.gradient_checkpointing_enable()
        again.zero_grad()
        torch.manual_seed(3)
        loss = again(**inputs).loss
        loss.backward()
        results.append((loss.detach(), gradients(again), torch.get_rng_state()))
        losses = mesh.tp.all_gather(loss.detach()[None])
        assert torch.equal(losses[0], losses[1]), f"losses of the ranks differ: {losses}"
        states = mesh.tp.all_gather(torch.get_rng_state()[None])
        assert torch.equal(states[0], states[1]), "the common random state differs after a step"
        for key, p in model.named_parameters():
            if registry[key].partition.kind == "replicate":
                both = mesh.tp.all_gather(p.grad[None])
                assert torch.equal(both[0], both[1]), f"the gradient of {key} differs between the ranks"
    for key, grad in results[0][1].items():
        torch.testing.assert_close(results[1][1][key], grad, rtol=1e-4, atol=1e-6)
    plain = copy.deepcopy(tiny_model(name, dtype=torch.float32, **drops)).eval()(**inputs).loss.item()
    assert abs(plain - results[0][0].item()) > 1e-4, "nothing was dropped"
    return "ok"


def masks_differ() -> str:
    """The masks over each rank's heads are drawn apart: equal weights and inputs on all heads give other outputs."""
    mesh = Mesh.build(2)
    model = tiny_model(
        "llama", dtype=torch.float32, num_attention_heads=2, num_key_value_heads=2, attention_dropout=0.5
    )
    for parameter in (m for m in model.model.layers[0].self_attn.parameters()):
        half = parameter.shape[0] // 2
        if parameter.shape[0] == 32:
            parameter.data[half:] = parameter.data[:half]
    parallelize(model, mesh)
    seen: list[Tensor] = []
    block = model.model.layers[0].self_attn
    block.o_proj.register_forward_pre_hook(lambda module, args: seen.append(args[0].detach()))
    torch.manual_seed(3)
    model(**batch(103))
    both = mesh.tp.all_gather(seen[0][None].contiguous())
    assert not torch.allclose(both[0], both[1]), "both ranks drew the same mask"
    return "ok"


CASES: dict[str, Callable[[], str]] = {
    "compiled llama": lambda: compiled("llama"),
    "compiled phi3, sequence parallel": lambda: compiled("phi3", sequence_parallel=True),
    "attention dropout": lambda: dropout("llama", {"attention_dropout": 0.3}),
    "gpt2 dropouts": lambda: dropout("gpt2", {"attn_pdrop": 0.3, "resid_pdrop": 0.3, "embd_pdrop": 0.1}),
    "gpt2 dropouts, sequence parallel": lambda: dropout(
        "gpt2", {"attn_pdrop": 0.3, "resid_pdrop": 0.3, "embd_pdrop": 0.1}, sequence_parallel=True
    ),
    "masks differ between ranks": masks_differ,
}


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    outcome = {}
    for name, case in CASES.items():
        try:
            outcome[name] = case()
        except Exception as error:
            outcome[name] = f"{type(error).__name__}: {error}"
        everyones: list[Any] = [None, None]
        dist.all_gather_object(everyones, outcome[name])
        outcome[name] = next((o for o in everyones if o != "ok"), "ok")
    if dist.get_rank() == 0:
        with open(sys.argv[1], "w") as file:
            json.dump(outcome, file)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
