"""Compiled training on ranks; see `ranks`. What is compiled by PyTorch's eager tracer computes what the module does."""

from __future__ import annotations

from typing import Any

import torch
from torch._dynamo.backends.debugging import aot_eager
from transformers import LlamaConfig, LlamaForCausalLM

import phalanx

LAYERS = 10


def losses(compile_options: dict[str, Any] | None, layers: int = LAYERS, **rules: Any) -> list[float]:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=103,
        use_cache=False,
    )
    model = LlamaForCausalLM._from_config(config, dtype=torch.float32).train()
    settings = {"train_micro_batch_size_per_gpu": 2, "tensor_parallel": {"autotp_size": 2, **rules}}
    engine, *_ = phalanx.initialize(
        model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2), config=settings
    )
    if compile_options is not None:
        engine.compile(**compile_options)
    ids = torch.randint(0, 103, (2, 16), generator=torch.Generator().manual_seed(1))
    found = []
    for _ in range(3):
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        found.append(float(loss.detach()))
    engine.destroy()
    return found


def case_blocks_share_one_graph_whose_mask_is_a_flag() -> None:
    torch._dynamo.reset()
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return aot_eager(graph, inputs)

    expected = losses(None)
    # More blocks than PyTorch compiles variants of one function.
    assert torch._dynamo.config.recompile_limit < LAYERS
    torch.testing.assert_close(losses({"backend": keep}), expected, rtol=1e-5, atol=1e-6)
    assert len(graphs) == 1
    (attention,) = [node for node in graphs[0].graph.nodes if "scaled_dot_product" in str(node.target)]
    assert attention.kwargs["is_causal"] and attention.kwargs["attn_mask"] is None


def case_the_whole_forward() -> None:
    torch._dynamo.reset()
    found = losses({"backend": "aot_eager", "whole": True}, layers=1)
    torch.testing.assert_close(found, losses(None, layers=1), rtol=1e-5, atol=1e-6)


def case_a_compiled_region_sums_the_gradients_of_its_input() -> None:
    """What overlaps in an eager backward pass is left to the compiler, and is computed all the same."""
    expected = losses(None, layers=2)
    for sequence_parallel in (False, True):
        torch._dynamo.reset()
        rules = {"tp_overlap_comm": True, "sequence_parallel": sequence_parallel}
        found = losses({"backend": "aot_eager"}, layers=2, **rules)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
