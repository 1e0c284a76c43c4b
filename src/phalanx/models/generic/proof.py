"""Proof that a module is served right: a small random one of its architecture, in pieces of two sequences, gives the
logits of transformers on each sequence alone."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from phalanx.distributed.group import SoloGroup
from phalanx.models.generic.attention import NAME, LayerAttention, Ragged
from phalanx.models.generic.model import ragged_logits, what_layers_ask
from phalanx.models.hf_config import ModelConfigError
from phalanx.models.placement import Placement
from phalanx.ops.batch import RaggedBatch
from phalanx.parallel.small_model import small_model

_BLOCK = 4
_WINDOW = 5
_LENGTHS = (11, 6)
# Tokens of each sequence in each step: a piece of both, then the rest in uneven pieces.
_STEPS = ((4, 3), (1, 3), (6, 0))
_TOLERANCE = 1e-4


def check_served_right(module: Any) -> None:
    """Compare a small module of the same class and config, served, with itself under transformers' own attention.

    Raises:
        ModelConfigError: the logits differ, or no small module can be built.
    """
    shrunk = copy.copy(module)
    shrunk.config = copy.deepcopy(module.config)
    text = shrunk.config.get_text_config(decoder=True)
    if isinstance(getattr(text, "sliding_window", None), int):
        text.sliding_window = _WINDOW
    shrunk.config._attn_implementation = "eager"
    small = small_model(shrunk)
    if small is None:
        raise ModelConfigError(
            f"model_type {module.config.model_type!r} has no family of its own here, and no small model of it can be "
            "built to prove that transformers' module is served right"
        )
    whole = small.model.eval()
    served: Any = copy.deepcopy(whole)
    served.set_attn_implementation(NAME)
    generator = torch.Generator().manual_seed(0)
    texts = [torch.randint(0, small.vocab_size, (length,), generator=generator) for length in _LENGTHS]
    with torch.inference_mode():
        expected = [whole(input_ids=text[None], use_cache=False).logits[0].float() for text in texts]
        found = _served_logits(served, texts)
    for each, right in zip(found, expected, strict=True):
        if not bool((each - right).norm() <= _TOLERANCE * right.norm()):
            raise ModelConfigError(
                f"model_type {module.config.model_type!r} has no family of its own here, and served through "
                "transformers' module it gives other logits than transformers does: its layers do more with a sequence "
                "than attend to it"
            )


def _served_logits(module: Any, texts: list[Tensor]) -> list[Tensor]:
    asked = what_layers_ask(copy.deepcopy(module).to("meta"))
    placement = Placement(SoloGroup(), torch.device("cpu"), torch.float64, {})
    blocks = -(-max(map(len, texts)) // _BLOCK)
    shape = (1 + blocks * len(texts), _BLOCK)

    def cache(a: LayerAttention) -> Tensor:
        return torch.full((*shape, a.num_kv_heads, a.head_dim), float("nan"), dtype=torch.float64)

    caches = [(cache(a), cache(a)) for a in asked]
    tables = 1 + torch.arange(blocks * len(texts), dtype=torch.int32).view(len(texts), blocks)
    done = [0] * len(texts)
    found: list[list[Tensor]] = [[] for _ in texts]
    for counts in _STEPS:
        here = [s for s, count in enumerate(counts) if count]
        batch = _batch(texts, tables, done, counts, here)
        logits = ragged_logits(module, batch, Ragged(placement, batch, caches, dict.fromkeys(range(len(asked)), 0)))
        for s, rows in zip(here, torch.split(logits, [counts[s] for s in here]), strict=True):
            found[s].append(rows)
            done[s] += counts[s]
    return [torch.cat(rows) for rows in found]


def _batch(
    texts: list[Tensor], tables: Tensor, done: list[int], counts: tuple[int, ...], here: list[int]
) -> RaggedBatch:
    places = [torch.arange(done[s], done[s] + counts[s]) for s in here]
    lens = torch.tensor([done[s] + counts[s] for s in here], dtype=torch.int32)
    starts = torch.tensor([0, *(counts[s] for s in here)]).cumsum(0).to(torch.int32)
    slots = [tables[s, p // _BLOCK].long() * _BLOCK + p % _BLOCK for s, p in zip(here, places, strict=True)]
    positions = torch.cat(places)
    return RaggedBatch(
        input_ids=torch.cat([texts[s][p] for s, p in zip(here, places, strict=True)]),
        positions=positions,
        cu_seqlens_q=starts,
        seq_lens=lens,
        slot_mapping=(torch.cat(slots),),
        block_tables=(tables[here],),
        logits_indices=torch.arange(len(positions)),
        rope_lens=positions + 1,
        max_query_len=max(counts),
        max_seq_len=int(lens.max()),
    )
