"""A model in a module of the user's: at most 60 lines, served because it is imported, right at every TP size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from phalanx.distributed.group import Group
from phalanx.distributed.thread_group import run_threads
from phalanx.engine.build import build_engine
from phalanx.models.hf_config import ModelConfigError

HIDDEN, HEADS, KV_HEADS, DIM, INNER, VOCAB = 16, 4, 2, 4, 22, 37
GROUP = HEADS // KV_HEADS
FUSED = (HEADS + 2 * KV_HEADS) * DIM
CONFIG = {
    "model_type": "toy_gpt",
    "hidden_size": HIDDEN,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "num_hidden_layers": 2,
    "intermediate_size": INNER,
    "vocab_size": VOCAB,
    "max_position_embeddings": 32,
    "hidden_act": "relu",
}
IDS = [3, 9, 1, 30, 36, 0, 12]


def weights() -> dict[str, Tensor]:
    """A checkpoint of the toy."""
    shapes = {"ln_1.low": (8,), "ln_1.high": (8,), "ln_2": (HIDDEN,), "attn.out": (HIDDEN, HEADS * DIM)}
    shapes |= {
        "attn.qkv": ((HEADS + 2 * KV_HEADS) * DIM, HIDDEN),
        "mlp.up": (INNER, HIDDEN),
        "mlp.down": (HIDDEN, INNER),
    }
    names = {f"h.{layer}.{name}": shape for layer in (0, 1) for name, shape in shapes.items()}
    names |= {"wte": (VOCAB, HIDDEN), "ln_f": (HIDDEN,), "head": (VOCAB, HIDDEN)}
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) * 0.4 for name, shape in names.items()}


def expected(w: dict[str, Tensor]) -> Tensor:
    """The same model written out: logits [len(IDS), VOCAB]."""
    angles = torch.arange(len(IDS))[:, None] * (1 / 10000.0 ** (torch.arange(0, DIM, 2) / DIM))
    cos, sin = angles.cos().repeat(1, 2)[:, None], angles.sin().repeat(1, 2)[:, None]

    def rotate(x: Tensor) -> Tensor:
        return x * cos + torch.cat((-x[..., DIM // 2 :], x[..., : DIM // 2]), -1) * sin

    x = w["wte"][IDS]
    for layer in ("h.0.", "h.1."):
        norm = torch.cat((w[layer + "ln_1.low"], w[layer + "ln_1.high"]))
        fused = (F.layer_norm(x, (HIDDEN,), norm) @ w[layer + "attn.qkv"].T).view(
            -1, KV_HEADS, HEADS // KV_HEADS + 2, DIM
        )
        q, k, v = fused[:, :, :-2].flatten(1, 2), fused[:, :, -2], fused[:, :, -1]
        q, k, v = rotate(q), rotate(k).repeat_interleave(GROUP, 1), v.repeat_interleave(GROUP, 1)
        q, k, v = (heads.transpose(0, 1) for heads in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + out.transpose(0, 1).flatten(1) @ w[layer + "attn.out"].T
        inner = F.relu(F.layer_norm(x, (HIDDEN,), w[layer + "ln_2"]) @ w[layer + "mlp.up"].T)
        x = x + (inner @ w[layer + "mlp.down"].T).clamp(-1, 1)
    return F.layer_norm(x, (HIDDEN,), w["ln_f"]) @ w["head"].T


def test_it_is_served_by_being_imported(policies: dict[str, Any]) -> None:
    with pytest.raises(ModelConfigError, match="model_type 'toy_gpt' is not served"):
        build_engine(weights(), hf_config=CONFIG, num_blocks=8)

    def run(group: Group) -> Tensor:
        # The plugin is what a started rank imports; here it would be enough to import it above.
        engine = build_engine(
            weights(),
            hf_config=CONFIG,
            group=group,
            tensor_parallel_size=group.size,
            num_blocks=8,
            device="cpu",
            plugins=("tests.models.toy_gpt",),
        )
        return torch.cat([engine.put([0], [part], logits="all") for part in (IDS[:4], IDS[4:5], IDS[5:])])

    for world in (1, 2, 4):
        for found in run_threads(world, run):
            assert torch.allclose(found, expected(weights()), atol=1e-4), world


def test_it_is_short() -> None:
    assert len(Path(__file__).with_name("toy_gpt.py").read_text().splitlines()) <= 60
