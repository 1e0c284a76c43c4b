"""Qwen, the first: a Qwen2 whose tensors are put together its way; beyond ``seq_length`` a plain forward of its own."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import Qwen2Config, Qwen2ForCausalLM

from phalanx.distributed.group import Group
from phalanx.distributed.thread_group import run_threads
from phalanx.engine.build import build_engine
from tests.models.tiny import chunked, error, randomize, reference

HEADS, HEAD, LAYERS, TRAINED, LENGTH = 4, 12, 2, 16, 40
IDS = torch.randint(3, 131, (LENGTH,), generator=torch.Generator().manual_seed(1)).tolist()


def qwen2() -> Any:
    return randomize(
        Qwen2ForCausalLM(
            Qwen2Config(
                hidden_size=HEADS * HEAD,
                intermediate_size=35,
                num_hidden_layers=LAYERS,
                num_attention_heads=HEADS,
                num_key_value_heads=HEADS,
                vocab_size=131,
                max_position_embeddings=64,
                rope_parameters={"rope_type": "default", "rope_theta": 1000.0},
                rms_norm_eps=1e-5,
            )
        )
    )


def config(**changes: Any) -> dict[str, Any]:
    """A config.json of Qwen."""
    values = {
        "model_type": "qwen",
        "hidden_size": HEADS * HEAD,
        "kv_channels": HEAD,
        "intermediate_size": 70,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "vocab_size": 131,
        "max_position_embeddings": 64,
        "seq_length": TRAINED,
        "rotary_emb_base": 1000,
        "rotary_pct": 1.0,
        "layer_norm_epsilon": 1e-5,
        "no_bias": True,
        "use_dynamic_ntk": False,
        "use_logn_attn": False,
        "tie_word_embeddings": False,
    }
    return {**values, **changes}


def tensors(module: Any) -> dict[str, Tensor]:
    """A Qwen2's weights as Qwen stores them."""
    given = module.state_dict()
    found = {
        "transformer.wte.weight": given["model.embed_tokens.weight"],
        "transformer.ln_f.weight": given["model.norm.weight"],
        "lm_head.weight": given["lm_head.weight"],
        "transformer.rotary_emb.inv_freq": torch.ones(HEAD // 2),
    }
    names = {
        "ln_1": "input_layernorm",
        "ln_2": "post_attention_layernorm",
        "attn.c_proj": "self_attn.o_proj",
        "mlp.w1": "mlp.up_proj",
        "mlp.w2": "mlp.gate_proj",
        "mlp.c_proj": "mlp.down_proj",
    }
    for layer in range(LAYERS):
        to, of = f"transformer.h.{layer}.", f"model.layers.{layer}."
        found |= {f"{to}{mine}.weight": given[f"{of}{theirs}.weight"] for mine, theirs in names.items()}
        for kind in ("weight", "bias"):
            parts = [given[f"{of}self_attn.{part}_proj.{kind}"] for part in "qkv"]
            found[f"{to}attn.c_attn.{kind}"] = torch.cat(parts)
    return found


def rotated(x: Tensor, alpha: float) -> Tensor:
    """x [T, heads, dim] with rope of base 1000 * alpha^(dim / (dim - 2))."""
    base = 1000.0 * alpha ** (HEAD / (HEAD - 2))
    angles = torch.arange(x.shape[0])[:, None] / base ** (torch.arange(0, HEAD, 2) / HEAD)
    turn = torch.polar(torch.ones_like(angles), angles)[:, None]
    pairs = torch.complex(x[..., : HEAD // 2], x[..., HEAD // 2 :]) * turn
    return torch.cat((pairs.real, pairs.imag), -1)


def plain(weights: dict[str, Tensor], ids: list[int], alpha: float, logn: bool) -> Tensor:
    """Logits of a whole prompt, as Qwen's own code computes them: base stretched by ``alpha``, log-n or not."""
    x = weights["transformer.wte.weight"][ids]
    positions = range(1, len(ids) + 1)
    factors = torch.tensor([math.log(i, TRAINED) if i > TRAINED and logn else 1.0 for i in positions])
    for layer in range(LAYERS):
        w = {name.removeprefix(f"transformer.h.{layer}."): tensor for name, tensor in weights.items()}
        normed = F.rms_norm(x, x.shape[-1:], w["ln_1.weight"], 1e-5)
        qkv = F.linear(normed, w["attn.c_attn.weight"], w["attn.c_attn.bias"])
        q, k, v = (part.unflatten(-1, (HEADS, HEAD)) for part in qkv.chunk(3, -1))
        q = rotated(q, alpha) * factors[:, None, None]
        heads = F.scaled_dot_product_attention(*(t.transpose(0, 1) for t in (q, rotated(k, alpha), v)), is_causal=True)
        x = x + F.linear(heads.transpose(0, 1).flatten(1), w["attn.c_proj.weight"])
        normed = F.rms_norm(x, x.shape[-1:], w["ln_2.weight"], 1e-5)
        gated = F.linear(normed, w["mlp.w1.weight"]) * F.silu(F.linear(normed, w["mlp.w2.weight"]))
        x = x + F.linear(gated, w["mlp.c_proj.weight"])
    return F.linear(F.rms_norm(x, x.shape[-1:], weights["transformer.ln_f.weight"], 1e-5), weights["lm_head.weight"])


def served(weights: dict[str, Tensor], chunks: list[int], group: Group, **changes: Any) -> Tensor:
    settings = {"num_blocks": 30, "block_size": 8, "tensor_parallel_size": group.size}
    engine = build_engine(weights, settings, hf_config=config(**changes), group=group)
    parts, start = [], 0
    for size in chunks:
        parts.append(engine.put([0], [IDS[start : start + size]], logits="all"))
        start += size
    return torch.cat(parts)


@pytest.mark.parametrize("chunks", [[LENGTH], chunked(LENGTH, 7), [LENGTH - 2, 1, 1]], ids=str)
def test_equals_qwen2_within_the_trained_length(chunks: list[int]) -> None:
    module = qwen2()
    expected = reference(module, IDS, [LENGTH])
    assert error(plain(tensors(module), IDS, 1, False), expected) < 1e-4
    for world in (1, 2, 4):
        for found in run_threads(world, lambda group: served(tensors(module), chunks, group)):
            assert error(found, expected) < 1e-4, world


@pytest.mark.parametrize(("ntk", "logn"), [(True, False), (False, True), (True, True)])
def test_beyond_the_trained_length(ntk: bool, logn: bool) -> None:
    weights = tensors(qwen2())
    alpha = 2 ** math.ceil(math.log2(LENGTH / TRAINED) + 1) - 1 if ntk else 1
    expected = plain(weights, IDS, alpha, logn)
    assert error(expected, plain(weights, IDS, 1, False)) > 1e-2
    for world in (1, 2):
        run = {"use_dynamic_ntk": ntk, "use_logn_attn": logn}
        for found in run_threads(world, lambda group, run=run: served(weights, [LENGTH], group, **run)):
            assert error(found, expected) < 1e-4, world


@pytest.mark.parametrize("length", [1, 15, 16, 17, 32, 33, 64, 65])
def test_the_base_grows_by_doublings(length: int) -> None:
    from phalanx.models.qwen.model import SteppedRope, SteppedRotary

    rope = SteppedRope("default", 1000.0, HEAD, 64, TRAINED)
    alpha = max(2 ** math.ceil(math.log(length / TRAINED, 2) + 1) - 1, 1)
    assert rope.regime(length) == alpha
    found = SteppedRotary(rope, torch.device("cpu")).inverse_frequencies(torch.tensor([length]))
    expected = (1000.0 * alpha ** (HEAD / (HEAD - 2))) ** -(torch.arange(0, HEAD, 2) / HEAD)
    assert error(found[0], expected) < 1e-6
