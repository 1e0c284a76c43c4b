"""A GPT-NeoX (Pythia) cut by rules that are written by hand, over a dataset that the ranks need not divide.

    phalanx launch --nproc 2 examples/training/custom_patterns.py --tp 2
    phalanx launch --nproc 2 examples/training/custom_patterns.py --tp 2 --qkv stacked   # refused, and why

Phalanx knows this architecture and needs no rules for it; they are what one writes for a model that it does not know.
"""

import argparse
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Sampler
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GPTNeoXConfig, PreTrainedModel

import phalanx

TINY = Path(__file__).parent / "configs" / "gpt-neox-tiny.json"


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a GPT-NeoX that is cut by hand-written rules.")
    parser.add_argument("--model", default=str(TINY), help="a folder or hub id, or a config (.json) for random weights")
    parser.add_argument("--data", default=__file__, help="a text file; by default it learns its own source")
    parser.add_argument("--tp", type=int, default=1, help="ranks that share one copy of the model")
    parser.add_argument("--zero", type=int, default=2, help="ZeRO stage, 0 to 3")
    parser.add_argument("--batch", type=int, default=4, help="samples of an update, over all ranks")
    parser.add_argument("--length", type=int, default=64, help="tokens of a sample")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--precision", choices=["fp32", "bf16", "fp16"], default="fp32")
    parser.add_argument("--qkv", choices=["heads", "stacked"], default="heads", help="the layout that is declared")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--local_rank", type=int, default=-1, help="given by the launcher")
    return parser.parse_args(given)


def rules(config: GPTNeoXConfig, qkv: str) -> list[dict[str, Any]]:
    """How each weight [out, in] is cut: the first rule whose pattern matches its name decides.

    `column` cuts the output features: each rank computes some of them, complete, and nothing is sent.
    `row` cuts the input features, those that the rank has from a column layer before; the results are summed up.
    """
    heads, width = config.num_attention_heads, config.hidden_size
    # The rows of query_key_value are [q, k, v] of head 0, then of head 1, and so on: a grid of which heads are cut.
    layout: dict[str, Any] = {"view": [heads, 3, width // heads], "axis": 0}
    if qkv == "stacked":
        # [all q, all k, all v]. Other models have it. Here it would mix heads up without an error; it is tried on a
        # small model before training, and refused.
        layout = {"shape": [[width, width, width], -1], "partition_dim": 0}
    return [
        {"patterns": [r".*\.attention\.query_key_value\.weight$"], "partition_type": "column", **layout},
        {"patterns": [r".*\.attention\.dense\.weight$"], "partition_type": "row"},
        {"patterns": [r".*\.mlp\.dense_h_to_4h\.weight$"], "partition_type": "column"},
        {"patterns": [r".*\.mlp\.dense_4h_to_h\.weight$"], "partition_type": "row"},
        # By token ids: the logits of the whole vocabulary are never on one rank.
        {"patterns": [r".*embed_in\.weight$", r"(lm_head|embed_out)\.weight$"], "partition_type": "vocab"},
    ]


class SharedOut(Sampler[int]):
    """An endless shuffle of `count` samples, of which the data-parallel ranks take turns.

    The ranks of one tensor-parallel group have one data-parallel rank, and so the same samples. Every rank can always
    go on, so none is a batch ahead when `count` does not divide; each pass over the data still shows every sample once.
    """

    def __init__(self, count: int, dp_rank: int, dp_size: int, seed: int) -> None:
        self.count, self.dp_rank, self.dp_size, self.seed = count, dp_rank, dp_size, seed

    def __iter__(self) -> Iterator[int]:
        return islice(self.order(), self.dp_rank, None, self.dp_size)

    def order(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.seed)  # of its own: all ranks shuffle alike
        while True:
            yield from torch.randperm(self.count, generator=generator).tolist()


def load(args: argparse.Namespace) -> PreTrainedModel:
    """The whole model, the same on all ranks."""
    if not args.model.endswith(".json"):
        return AutoModelForCausalLM.from_pretrained(args.model, dtype="float32" if args.precision == "fp32" else "auto")
    torch.manual_seed(args.seed)
    return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(args.model))


def windows(path: str, model: str, length: int) -> list[Tensor]:
    """The file's tokens (bytes, where there is no tokenizer), in samples of one length, so that none is padded."""
    text = Path(path).read_text()
    ids = list(text.encode()) if model.endswith(".json") else AutoTokenizer.from_pretrained(model)(text)["input_ids"]
    if len(ids) < length:
        raise SystemExit(f"{path} has {len(ids)} tokens: give a longer text, or a --length of no more than that")
    return list(torch.tensor(ids[: len(ids) // length * length]).view(-1, length))


def main(given: list[str] | None = None) -> None:
    args = arguments(given)
    phalanx.init_distributed()
    model = load(args)
    config = {
        "train_batch_size": args.batch,
        "zero_optimization": {"stage": args.zero},
        "tensor_parallel": {
            "autotp_size": args.tp,
            "partition_config": {"layer_specs": rules(model.config, args.qkv)},
            "verify": "error",  # what it is for rules written by hand; "warn" goes on, "off" does not try them
        },
    }
    if args.precision != "fp32":
        config[args.precision] = {"enabled": True}
    # The optimizer may be made before the model is cut: its parameters stay the same objects.
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    engine, *_ = phalanx.initialize(args, model=model, optimizer=optimizer, config=config)
    engine.train()

    dp, first = engine.mesh.dp, engine.mesh.tp.rank == engine.mesh.dp.rank == 0
    texts = windows(args.data, args.model, args.length)
    if first:
        qkv = next(layout for name, layout in engine.registry.items() if "query_key_value" in name)
        print(f"{len(texts)} samples; {qkv.name} {list(qkv.shape)} is {list(engine.registry.local_shape(qkv.name))}")
    size = engine.train_micro_batch_size_per_gpu()
    batches = iter(DataLoader(texts, size, sampler=SharedOut(len(texts), dp.rank, dp.size, args.seed)))
    for step in range(args.steps):
        ids = next(batches).to(engine.device)
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        # Of all samples, not of one rank's: samples of one length make the mean over ranks that over tokens.
        mean = dp.all_reduce(loss.detach().float()) / dp.size
        if first:
            print(f"step {step} loss {mean.item():.5f}")
    engine.destroy()


if __name__ == "__main__":
    main()
    phalanx.comm.destroy_process_group()
