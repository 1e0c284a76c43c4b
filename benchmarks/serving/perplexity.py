"""What quantised weights cost: a model's perplexity by the engine itself, against the same weights as they are.

    python benchmarks/serving/perplexity.py --model smollm2 --reorder --output FILE.json

Every way reads the same windows of tokens, each a prompt of its own after the beginning token, and the engine says how
likely each token was. The ratio to the unquantised model is that of paired losses. Its standard error is clustered by
document, since the tokens of a document are not independent of each other.

The text: Python's own help (``pydoc_data.topics``), each topic a document, without paragraphs that stand in a longer
one. It comes with every Python and is fixed within a version, but versions differ a little: ``text_sha256`` of the
tokens says whether two runs read the same. ``--text`` reads files instead, each a document.

A file whose weights are few bits already (a GGUF in Q4, as smollm2 is) makes int4 look free: groups that lie where the
file's lie find its numbers again. ``--reorder`` brings the model's channels into another, random order. That is the
same function, and costs fp8 and int8 the same, but int4's groups hold what they would hold in a model of 16 bits.

fp8 of a narrow model, as smollm2 is, quantises weights alone. ``--fp8-activations`` quantises its activations too, as
those of wider models are.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np
import torch
from torch import Tensor

from phalanx import LLM, SamplingParams
from phalanx.bench.machine import machine
from phalanx.engine.opened_model import OpenedModel
from phalanx.ops import quantized
from phalanx.weights import open_source

QUANTIZATIONS = ("fp8", "int8", "int4")


@dataclass(frozen=True)
class Window:
    """Tokens that are read as one prompt: all but the first are predicted."""

    document: str
    tokens: list[int]


def help_topics() -> dict[str, str]:
    """Name -> text, the longest first; a paragraph that came before is left out."""
    seen: set[str] = set()
    documents = {}
    for name in sorted(topics, key=lambda name: (-len(topics[name]), name)):
        paragraphs = {" ".join(text.split()): text for text in topics[name].split("\n\n")}
        documents[name] = "\n\n".join(text for key, text in paragraphs.items() if key not in seen)
        seen.update(paragraphs)
    return documents


def deal(documents: Mapping[str, Sequence[int]], start: Sequence[int], length: int, count: int) -> list[Window]:
    """``count`` whole windows of ``length`` tokens: the first of each document, then the second of each, and so on.

    Raises:
        ValueError: the documents do not hold as many, or only one of them holds any.
    """
    size = length - len(start)
    places = [(turn, name) for name, tokens in documents.items() for turn in range(len(tokens) // size)]
    # Sorting by the turn alone leaves the documents in their order.
    chosen = sorted(places, key=lambda place: place[0])[:count]
    windows = [Window(name, [*start, *documents[name][turn * size : (turn + 1) * size]]) for turn, name in chosen]
    if len(windows) < count or len({window.document for window in windows}) < 2:
        raise ValueError(
            f"{count} windows of {size} tokens from at least two documents are needed; the text has {len(places)} "
            f"in {len({name for _, name in places})}: ask for other --windows or --predictions, or give more --text"
        )
    return windows


def reordered(tensors: Iterable[tuple[str, Tensor]], config: Mapping[str, Any]) -> dict[str, Tensor]:
    """A Llama's weights, float32, with the channels of the residual stream, the MLP and each head's values shuffled.

    Raises:
        ValueError: a tensor that is none of Llama's.
    """
    chance = torch.Generator().manual_seed(0)
    heads = config["num_attention_heads"]
    width = config.get("head_dim") or config["hidden_size"] // heads
    hidden = torch.randperm(config["hidden_size"], generator=chance)
    inner = torch.randperm(config["intermediate_size"], generator=chance)
    values = torch.randperm(width, generator=chance)

    def of_heads(count: int) -> Tensor:
        return (torch.arange(count)[:, None] * width + values).flatten()

    orders: dict[str, tuple[Tensor | None, ...]] = {
        "embed_tokens": (None, hidden),
        "lm_head": (None, hidden),
        "norm": (hidden,),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
        "q_proj": (None, hidden),
        "k_proj": (None, hidden),
        "v_proj": (of_heads(config.get("num_key_value_heads") or heads), hidden),
        "o_proj": (hidden, of_heads(heads)),
        "gate_proj": (inner, hidden),
        "up_proj": (inner, hidden),
        "down_proj": (hidden, inner),
    }
    found = {}
    for name, tensor in tensors:
        *_, module, kind = ["", *name.split(".")]
        if module not in orders or kind != "weight":
            raise ValueError(f"only a Llama's channels can be reordered, and {name} is none of its tensors")
        tensor = tensor.float()
        for axis, order in enumerate(orders[module]):
            tensor = tensor if order is None else tensor.index_select(axis, order)
        found[name] = tensor
    return found


def losses(model: Any, windows: Sequence[Window], settings: Mapping[str, Any]) -> np.ndarray:
    """-log of the probability of every token but the first, ``[windows, predictions]``."""
    # Nothing is shared between prompts: every token is computed here.
    with LLM(model, prefix_cache=False, max_model_len=len(windows[0].tokens), **settings) as llm:
        params = SamplingParams(max_tokens=0, prompt_logprobs=0)
        answers = llm.generate([window.tokens for window in windows], params)
    found = np.empty((len(windows), len(windows[0].tokens) - 1))
    for row, window, answer in zip(found, windows, answers, strict=True):
        said = answer.prompt_logprobs or []
        for place, (token, entry) in enumerate(zip(window.tokens, said, strict=True)):
            value = None if entry is None else entry[token]
            if place and (value is None or not math.isfinite(value)):
                raise RuntimeError(f"token {place} of a window of {window.document} has no finite log-probability")
            if place:
                row[place - 1] = -(value or 0.0)
    return found


def cost(plain: np.ndarray, other: np.ndarray, documents: Sequence[str]) -> dict[str, float]:
    """Perplexities' ratio and its standard error, of losses ``[windows, predictions]`` and each window's document.

    With d the mean difference of losses, the ratio is exp(d); its error is exp(d) times d's, which comes from the
    documents' sums of what their tokens differ from d.
    """
    differences = other - plain
    mean = differences.mean()
    rest: dict[str, float] = {}
    for document, row in zip(documents, differences - mean, strict=True):
        rest[document] = rest.get(document, 0.0) + row.sum()
    clusters = len(rest)
    variance = clusters / (clusters - 1) * sum(value**2 for value in rest.values()) / differences.size**2
    return {
        "perplexity": math.exp(other.mean()),
        "ratio": math.exp(mean),
        "ratio_standard_error": math.exp(mean) * math.sqrt(variance),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="what LLM takes: a folder, a GGUF file, smollm2")
    parser.add_argument("--quantization", nargs="+", choices=QUANTIZATIONS, default=list(QUANTIZATIONS))
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--predictions", type=int, default=1023, help="tokens of a window that are predicted")
    parser.add_argument("--text", type=Path, nargs="+", help="documents in UTF-8, in place of Python's help")
    parser.add_argument("--reorder", action="store_true", help="shuffle the channels of a Llama first")
    parser.add_argument("--fp8-activations", action="store_true", help="take no model for a narrow one")
    parser.add_argument("--output", type=Path)
    asked = parser.parse_args(arguments)
    if asked.fp8_activations:
        quantized.NARROW = 0

    opened = OpenedModel(asked.model)
    tokenizer = opened.tokenizer()
    if tokenizer is None:
        parser.error(f"{asked.model} has no tokenizer")
    texts = {str(path): path.read_text("utf-8") for path in asked.text} if asked.text else help_topics()
    tokens = {name: tokenizer.encode(text, add_special_tokens=False) for name, text in texts.items()}
    start = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    try:
        windows = deal(tokens, start, asked.predictions + 1, asked.windows)
    except ValueError as error:
        parser.error(str(error))
    documents = [window.document for window in windows]

    model: Any = asked.model
    settings: dict[str, Any] = {"dtype": asked.dtype}
    if asked.reorder:
        source = opened.source or open_source(opened.path)
        settings["hf_config"] = dict(opened.config.given)
        model = reordered(((name, source.read(name)) for name in source.names()), settings["hf_config"])

    plain = losses(model, windows, settings)
    found = {asked.dtype: {"perplexity": math.exp(plain.mean())}}
    print(f"{asked.dtype:9} perplexity {math.exp(plain.mean()):.4f}, {plain.size} tokens", flush=True)
    for name in asked.quantization:
        found[name] = one = cost(plain, losses(model, windows, {**settings, "quantization": name}), documents)
        spread = one["ratio_standard_error"]
        print(f"{name:9} perplexity {one['perplexity']:.4f}, ratio {one['ratio']:.4f} +- {spread:.4f}", flush=True)
    if asked.output:
        report = {
            "model": asked.model,
            "command": "python " + " ".join(sys.argv),
            "dtype": asked.dtype,
            "reordered": asked.reorder,
            "text": [str(path) for path in asked.text] if asked.text else "pydoc_data.topics",
            "text_sha256": hashlib.sha256(json.dumps([window.tokens for window in windows]).encode()).hexdigest(),
            "windows": len(windows),
            "documents": len(set(documents)),
            "tokens": plain.size,
            "results": found,
            "machine": machine(),
        }
        asked.output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
