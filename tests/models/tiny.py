"""Tiny random models of transformers, and what they answer: the reference that ours are held against."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

LONG = 96
"""Tokens that go well beyond the 32 positions that the rope variants are trained for."""


def llama_config(**changes: Any) -> LlamaConfig:
    """A Llama of two layers, with everything odd that a config may have: sizes that do not divide, a wide head."""
    values: dict[str, Any] = {
        "hidden_size": 48,
        "intermediate_size": 70,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 131,
        "max_position_embeddings": 32,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return LlamaConfig(**{**values, **changes})


def llama(config: LlamaConfig, seed: int = 0) -> LlamaForCausalLM:
    """The model in fp32 with weights large enough that every part shows in the logits."""
    return randomize(LlamaForCausalLM(config), seed)


def randomize(model: Any, seed: int = 0) -> Any:
    """A module of transformers with weights large enough that every part shows in the logits."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=0.15)
            elif "norm" in name and name.endswith("weight"):
                torch.nn.init.uniform_(parameter, 0.5, 1.5)
            else:
                torch.nn.init.normal_(parameter, std=0.3)
    return model.eval()


def save(model: Any, folder: Path) -> Path:
    """The model as a Hugging Face folder."""
    model.save_pretrained(folder)
    return folder


@torch.no_grad()
def reference(model: Any, ids: list[int], chunks: list[int]) -> Tensor:
    """transformers' logits [len(ids), vocab] for one sequence alone, given to it in chunks of these sizes."""
    # A copy: its dynamic rope remembers the longest sequence that it has ever seen.
    model = copy.deepcopy(model)
    cache, found, start = None, [], 0
    for size in chunks:
        part = torch.tensor([ids[start : start + size]])
        out = model(part, past_key_values=cache, use_cache=True)
        cache, start = out.past_key_values, start + size
        found.append(out.logits[0])
    return torch.cat(found)


def chunked(length: int, size: int) -> list[int]:
    """``length`` as pieces of ``size`` and a rest."""
    return [size] * (length // size) + ([length % size] if length % size else [])


def error(found: Tensor, expected: Tensor) -> float:
    """Largest difference, relative to the largest expected value."""
    return float((found.cpu() - expected.cpu()).abs().max() / expected.abs().max())
