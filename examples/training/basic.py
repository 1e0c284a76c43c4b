"""A Llama on any grid of ranks: tensor parallel x data parallel x ZeRO.

    phalanx launch --nproc 4 examples/training/basic.py --tp 2 --zero 2

4 ranks with `--tp 2` are two copies of the model, each cut over two ranks. What is printed is the same for every grid:
a step takes the same samples on each of them.
"""

import argparse
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

import phalanx

TINY = Path(__file__).parent / "configs" / "llama-tiny.json"


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a Llama on sequences that count upwards.")
    parser.add_argument("--model", default=str(TINY), help="a folder or hub id, or a config (.json) for random weights")
    parser.add_argument("--tp", type=int, default=1, help="ranks that share one copy of the model")
    parser.add_argument("--zero", type=int, default=1, help="ZeRO stage: what the copies share, 0 to 3")
    parser.add_argument("--batch", type=int, default=8, help="samples of an update, over all ranks")
    parser.add_argument("--accumulate", type=int, default=1, help="passes of an update")
    parser.add_argument("--length", type=int, default=32, help="tokens of a sample")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--clip", type=float, default=1.0, help="largest norm of the gradient")
    parser.add_argument("--precision", choices=["fp32", "bf16", "fp16"], default="fp32")
    parser.add_argument("--sequence-parallel", action="store_true", help="cut the tokens between blocks as well")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--local_rank", type=int, default=-1, help="given by the launcher")
    return parser.parse_args(given)


def load(args: argparse.Namespace) -> PreTrainedModel:
    """A model of which each rank will read its part (see memory.py), or random weights, the same on all ranks."""
    if not args.model.endswith(".json"):
        return phalanx.from_pretrained(args.model, dtype="float32" if args.precision == "fp32" else None)
    torch.manual_seed(args.seed)
    return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(args.model))


def samples(vocab_size: int, args: argparse.Namespace) -> Iterator[Tensor]:
    """For each pass the samples of all ranks, [samples, length]: a random start, then one more each time."""
    generator = torch.Generator().manual_seed(args.seed)
    while True:
        start = torch.randint(vocab_size, (args.batch // args.accumulate, 1), generator=generator)
        yield (start + torch.arange(args.length)) % vocab_size


def main(given: list[str] | None = None) -> None:
    args = arguments(given)
    phalanx.init_distributed()  # one process alone, without a launcher, is a grid of one
    config = {
        # Samples of an update over the whole grid. The ranks of a tensor-parallel group see the same samples, so
        # they count once: batch = samples of a pass x passes x data-parallel ranks.
        "train_batch_size": args.batch,
        "gradient_accumulation_steps": args.accumulate,
        "gradient_clipping": args.clip,
        "zero_optimization": {"stage": args.zero},
        # No rules: the model's type says how its weights are cut.
        "tensor_parallel": {"autotp_size": args.tp, "sequence_parallel": args.sequence_parallel},
        "optimizer": {"type": "AdamW", "params": {"lr": args.lr, "weight_decay": 0.01}},
    }
    if args.precision != "fp32":
        config[args.precision] = {"enabled": True}  # float32 master weights stay behind
    engine, *_ = phalanx.initialize(args, model=load(args), config=config)
    engine.train()

    # `dp` are the ranks at this rank's place in the other copies of the model: they share the samples out.
    dp, first = engine.mesh.dp, engine.mesh.tp.rank == engine.mesh.dp.rank == 0
    data = samples(engine.module.config.vocab_size, args)
    for step in range(args.steps):
        started, mean = time.perf_counter(), torch.zeros((), device=engine.device)
        for _ in range(args.accumulate):
            ids = next(data)[dp.rank :: dp.size].to(engine.device)
            loss = engine(input_ids=ids, labels=ids).loss
            engine.backward(loss)
            engine.step()  # updates in the last pass only
            mean += loss.detach().float() / args.accumulate
        # A rank knows the loss of its own samples; the gradient is that of the mean over the copies.
        mean = dp.all_reduce(mean) / dp.size
        if first:
            rate = args.batch * args.length / (time.perf_counter() - started)
            print(f"step {step} loss {mean.item():.5f} norm {engine.get_global_grad_norm():.5f} {rate:.0f} tokens/s")
    engine.destroy()


if __name__ == "__main__":
    main()
    phalanx.comm.destroy_process_group()
