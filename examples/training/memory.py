"""What a rank needs: a model that is loaded whole and then cut, against one that is loaded in slices.

    phalanx launch --nproc 2 examples/training/memory.py --tp 2 --load whole
    phalanx launch --nproc 2 examples/training/memory.py --tp 2 --load slices

On GPUs: bytes of tensors now and at most since the line before, and what torch holds. On CPUs: the most memory that the
process has had, less what it had at the start.
"""

import argparse
import multiprocessing
import resource
import sys
import tempfile
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

import phalanx

SMALL = Path(__file__).parent / "configs" / "llama-40m.json"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Compare two ways of loading a model that is then cut.")
    parser.add_argument("--model", default=str(SMALL), help="a folder, or a config (.json) for random weights")
    parser.add_argument("--load", choices=["whole", "slices"], default="slices")
    parser.add_argument("--tp", type=int, default=1, help="ranks that share one copy of the model")
    parser.add_argument("--zero", type=int, default=1, help="ZeRO stage, 0 to 3")
    parser.add_argument("--batch", type=int, default=1, help="samples of one data-parallel rank")
    parser.add_argument("--length", type=int, default=32, help="tokens of a sample")
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--precision", choices=list(DTYPES), default="fp32")
    parser.add_argument("--local_rank", type=int, default=-1, help="given by the launcher")
    return parser.parse_args(given)


def write_random(config: str, folder: str) -> None:
    """A checkpoint of random weights."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(config)).save_pretrained(folder)


class Memory:
    """Prints, on rank 0, the least and the most that the ranks need."""

    def __init__(self) -> None:
        self.here = phalanx.get_accelerator()
        self.at_start = self.peak_of_process()

    @staticmethod
    def peak_of_process() -> int:
        """Bytes. Linux counts in KiB, macOS in bytes."""
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else 1024 * peak

    def show(self, when: str) -> None:
        if torch.cuda.is_available():
            found = {
                "allocated": self.here.memory_allocated(),
                "peak": self.here.max_memory_allocated(),
                "reserved": self.here.memory_reserved(),
            }
            self.here.reset_peak_memory_stats()
        else:
            found = {"peak": self.peak_of_process() - self.at_start}
        everyone: list[dict[str, int]] = [{}] * phalanx.comm.get_world_size()
        phalanx.comm.all_gather_object(everyone, found)
        if phalanx.comm.get_rank() == 0:
            for name in found:
                sizes = [each[name] / 2**20 for each in everyone]
                print(f"{when:17} {name:9} MiB: least {min(sizes):.0f} most {max(sizes):.0f}", flush=True)


def main(given: list[str] | None = None) -> None:
    args = arguments(given)
    phalanx.init_distributed()
    with tempfile.TemporaryDirectory() as scratch:
        folder = [args.model]
        if args.model.endswith(".json"):
            folder = [scratch]
            if phalanx.comm.get_rank() == 0:
                # In a process of its own, whose memory does not count here.
                writer = multiprocessing.get_context("spawn").Process(target=write_random, args=(args.model, scratch))
                writer.start()
                writer.join()
            phalanx.comm.broadcast_object_list(folder)  # rank 0's
        measure(args, folder[0])
        phalanx.comm.barrier()


def measure(args: argparse.Namespace, folder: str) -> None:
    memory, dtype = Memory(), DTYPES[args.precision]
    if args.load == "whole":
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(phalanx.get_accelerator().device())
    else:
        # Shapes only. `initialize` cuts them, and reads this rank's part of each tensor.
        model = phalanx.from_pretrained(folder, dtype=dtype)
    memory.show("after load")

    config = {
        "train_micro_batch_size_per_gpu": args.batch,
        "zero_optimization": {"stage": args.zero},
        "tensor_parallel": {"autotp_size": args.tp},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
    }
    if args.precision != "fp32":
        config[args.precision] = {"enabled": True}
    engine, *_ = phalanx.initialize(args, model=model, config=config)
    engine.train()
    memory.show("after initialize")

    generator = torch.Generator().manual_seed(engine.mesh.dp.rank)
    for _ in range(args.steps):
        ids = torch.randint(engine.module.config.vocab_size, (args.batch, args.length), generator=generator)
        ids = ids.to(engine.device)
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
    memory.show("after the steps")
    engine.destroy()


if __name__ == "__main__":
    main()
    phalanx.comm.destroy_process_group()
