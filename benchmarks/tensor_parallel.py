"""Host time of tensor parallelism: forward and backward of a small Llama, uncut and cut over all ranks, and cut by
transformers itself.

    torchrun --nproc_per_node 2 benchmarks/tensor_parallel.py --output benchmarks/out/tensor_parallel.json

With tensors this small, what is measured is the cost of the calls. Host time is the processor time of the thread that
runs the model (on the CPU its backward as well), and so without the back end that moves the data and without the
waiting for other ranks; the clock's time is with both. Each repetition runs every variant once, in turn; the figures
are medians. All ranks start a variant together.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from phalanx.bench.machine import machine
from phalanx.distributed.mesh import Mesh
from phalanx.parallel import parallelize


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--repeat", type=int, default=30)
    parser.add_argument("--output", type=Path, help="write the figures as JSON")
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    if torch.cuda.is_available():
        torch.cuda.set_device(dist.get_rank())
    mesh = Mesh.build(dist.get_world_size())
    variants = {name: model.to(mesh.device).train() for name, model in models(args, mesh).items()}
    ids = torch.randint(0, 1000, (args.batch, args.length), generator=torch.Generator().manual_seed(0)).to(mesh.device)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in variants}
    losses = {}
    for turn in range(args.repeat + 3):
        for name, model in variants.items():
            model.zero_grad()
            dist.barrier()
            start, busy = time.perf_counter(), time.thread_time()
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            if mesh.device.type == "cuda":
                torch.cuda.synchronize()
            if turn >= 3:
                times[name].append((1e3 * (time.thread_time() - busy), 1e3 * (time.perf_counter() - start)))
            losses[name] = loss.detach().item()
    if dist.get_rank() == 0:
        report(args, times, losses)
    dist.destroy_process_group()


def models(args: argparse.Namespace, mesh: Mesh) -> dict[str, Any]:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=args.hidden,
        intermediate_size=2 * args.hidden,
        num_hidden_layers=args.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=1000,
    )
    whole = LlamaForCausalLM(config)
    cut, by_tokens = copy.deepcopy(whole), copy.deepcopy(whole)
    parallelize(cut, mesh)
    parallelize(by_tokens, mesh, sequence_parallel=True)
    found = {"uncut": whole, "phalanx": cut, "phalanx, sequence parallel": by_tokens}
    with tempfile.TemporaryDirectory() as folder:
        folders: list[Any] = [folder]
        dist.broadcast_object_list(folders)
        if dist.get_rank() == 0:
            whole.save_pretrained(folders[0])
        dist.barrier()
        try:
            found["transformers"] = AutoModelForCausalLM.from_pretrained(folders[0], **own_plan())
        except (ImportError, RuntimeError, ValueError, TypeError, AttributeError) as error:
            if dist.get_rank() == 0:
                print(f"transformers' own tensor parallelism is left out: {type(error).__name__}: {error}")
        dist.barrier()
    return found


def own_plan() -> dict[str, Any]:
    """How transformers is asked to cut a model: since 5.18 by a config object. Needs accelerate."""
    try:
        from transformers.distributed import DistributedConfig

        return {"distributed_config": DistributedConfig(tp_plan="auto")}
    except (ImportError, TypeError):
        return {"tp_plan": "auto"}


def report(args: argparse.Namespace, times: dict[str, list[tuple[float, float]]], losses: dict[str, float]) -> None:
    medians = {name: [statistics.median(each) for each in zip(*pairs, strict=True)] for name, pairs in times.items()}
    results = {}
    print(f"{'variant':<30}{'host ms':>10}{'x uncut':>10}{'clock ms':>10}{'x uncut':>10}{'loss':>10}")
    for name, (host, clock) in medians.items():
        ratios = [mine / whole for mine, whole in zip((host, clock), medians["uncut"], strict=True)]
        results[name] = {
            "host_ms": round(host, 2),
            "host_ratio": round(ratios[0], 3),
            "clock_ms": round(clock, 2),
            "clock_ratio": round(ratios[1], 3),
            "loss": losses[name],
        }
        print(f"{name:<30}{host:>10.2f}{ratios[0]:>10.2f}{clock:>10.2f}{ratios[1]:>10.2f}{losses[name]:>10.4f}")
    if args.output is not None:
        record = {
            "command": " ".join(["torchrun", "--nproc_per_node", str(dist.get_world_size()), *sys.argv]),
            "machine": machine(),
            "results": results,
        }
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
