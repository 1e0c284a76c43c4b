"""A training step on several GPUs: Llama widths, random tokens, the plain loop; Phalanx and its peers in one run.

    torchrun --nproc_per_node 2 benchmarks/train_step.py --output benchmarks/out/train_step.json

Every variant is built, warmed up, timed and freed in turn. `model TFLOP/s` counts 6 x parameters x tokens and the
attention products, over the step's time and the number of GPUs.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from benchmarks.idle import idle_times
from transformers import LlamaConfig, LlamaForCausalLM

import phalanx
from phalanx.bench.machine import machine

Step = Callable[[torch.Tensor], float]
Close = Callable[[], None]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--intermediate", type=int, default=14336)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--vocab", type=int, default=128256)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--variant", action="append", choices=list(VARIANTS), help="default: all")
    parser.add_argument("--kernels", type=int, default=0, help="list as many of what takes the device's time")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    phalanx.init_distributed()
    rank, world = dist.get_rank(), dist.get_world_size()
    if torch.cuda.is_available():
        torch.cuda.set_device(rank % torch.cuda.device_count())
    results = {}
    for name in args.variant or VARIANTS:
        try:
            results[name] = measure(name, args, world)
        except Exception as error:
            results[name] = {"error": f"{type(error).__name__}: {str(error)[:300]}"}
        if rank == 0:
            print(name, results[name], flush=True)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    if rank == 0 and args.output is not None:
        command = " ".join(["torchrun", "--nproc_per_node", str(world), *sys.argv])
        args.output.parent.mkdir(parents=True, exist_ok=True)
        record = {"command": command, "machine": machine(), "results": results}
        args.output.write_text(json.dumps(record, indent=1) + "\n")
    dist.barrier()
    dist.destroy_process_group()


def build(args: argparse.Namespace) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=args.hidden,
        intermediate_size=args.intermediate,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        num_key_value_heads=args.kv_heads,
        vocab_size=args.vocab,
        use_cache=False,
    )
    with torch.device(device()):
        return LlamaForCausalLM._from_config(config, dtype=torch.bfloat16)


def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def engine_step(
    model: torch.nn.Module,
    tp: int,
    stage: int,
    args: argparse.Namespace,
    *,
    narrow: bool = False,
    compiled: dict[str, Any] | None = None,
    optimizer: Callable[..., torch.optim.Optimizer] = phalanx.FusedAdam,
    **rules: Any,
) -> tuple[Step, Close]:
    config = {
        "train_micro_batch_size_per_gpu": args.batch,
        "bf16": {"enabled": True, "bf16_master_weights_and_grads": narrow, "bf16_optimizer_states": narrow},
        "zero_optimization": {"stage": stage},
        "tensor_parallel": {"autotp_size": tp, **rules},
    }
    updates = optimizer(model.parameters(), lr=1e-5, weight_decay=0.01)
    engine, _, _, _ = phalanx.initialize(model=model, optimizer=updates, config=config)
    if compiled is not None:
        engine.compile(**compiled)

    def step(ids: torch.Tensor) -> float:
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        return float(loss.detach())

    return step, engine.destroy


def fsdp_step(model: torch.nn.Module) -> tuple[Step, Close]:
    from torch.distributed.fsdp import fully_shard

    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    return plain_step(model)


def transformers_step(model: Any) -> tuple[Step, Close]:
    """transformers' own tensor parallelism of a model in memory: through a folder, which is how it cuts."""
    import tempfile

    from transformers import AutoModelForCausalLM

    folders = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folders)
    if dist.get_rank() == 0:
        model.save_pretrained(folders[0])
    dist.barrier()
    del model
    return plain_step(AutoModelForCausalLM.from_pretrained(folders[0], tp_plan="auto", dtype=torch.bfloat16))


def plain_step(model: Any) -> tuple[Step, Close]:
    # A fused step takes plain tensors or DTensors, not both.
    kinds: dict[type, list[torch.Tensor]] = {}
    for parameter in model.parameters():
        kinds.setdefault(type(parameter.data), []).append(parameter)
    optimizers = [torch.optim.AdamW(each, lr=1e-5, fused=torch.cuda.is_available()) for each in kinds.values()]

    def step(ids: torch.Tensor) -> float:
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return float(loss.detach())

    return step, lambda: None


# torch.compile moves collectives apart from what waits for them.
OVERLAPPED = {
    "options": {
        "reorder_for_compute_comm_overlap": True,
        "reorder_for_compute_comm_overlap_passes": [
            "reorder_communication_preserving_peak_memory",
            "sink_waits_iterative",
            "reorder_communication_preserving_peak_memory",
        ],
    }
}

VARIANTS: dict[str, Callable[[argparse.Namespace, int], tuple[tuple[Step, Close], int]]] = {
    "phalanx tp, zero 1": lambda args, world: (engine_step(build(args), world, 1, args), 1),
    "phalanx tp, sequence parallel": lambda args, world: (
        engine_step(build(args), world, 1, args, sequence_parallel=True),
        1,
    ),
    "phalanx tp, bf16 masters": lambda args, world: (engine_step(build(args), world, 0, args, narrow=True), 1),
    "phalanx tp, bf16 masters, torch's fused AdamW": lambda args, world: (
        engine_step(build(args), world, 0, args, narrow=True, optimizer=partial(torch.optim.AdamW, fused=True)),
        1,
    ),
    "phalanx tp, bf16 masters, overlapped": lambda args, world: (
        engine_step(build(args), world, 0, args, narrow=True, tp_overlap_comm=True),
        1,
    ),
    "phalanx tp, bf16 masters, compiled": lambda args, world: (
        engine_step(build(args), world, 0, args, narrow=True, compiled={}),
        1,
    ),
    "phalanx tp, bf16 masters, compiled, overlapped": lambda args, world: (
        engine_step(build(args), world, 0, args, narrow=True, compiled={"compile_kwargs": OVERLAPPED}),
        1,
    ),
    "phalanx tp, bf16 masters, compiled as a whole": lambda args, world: (
        engine_step(build(args), world, 0, args, narrow=True, compiled={"whole": True}),
        1,
    ),
    "phalanx dp, zero 1": lambda args, world: (engine_step(build(args), 1, 1, args), world),
    "phalanx dp, zero 2": lambda args, world: (engine_step(build(args), 1, 2, args), world),
    "phalanx dp, zero 3": lambda args, world: (engine_step(build(args), 1, 3, args), world),
    "fsdp2 dp, bf16 without fp32 masters": lambda args, world: (fsdp_step(build(args)), world),
    "transformers tp, bf16 without fp32 masters": lambda args, world: (transformers_step(build(args)), 1),
}


def measure(name: str, args: argparse.Namespace, world: int) -> dict[str, Any]:
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    (step, close), replicas = VARIANTS[name](args, world)
    seed = dist.get_rank() if replicas > 1 else 0
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, args.vocab, (args.batch, args.length), generator=generator).to(device())
    torch.manual_seed(0)
    losses = [step(ids) for _ in range(3)]
    times = []
    for _ in range(args.steps):
        dist.barrier()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        start = time.perf_counter()
        losses.append(step(ids))
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    kernels = kernel_times(lambda: step(ids), args.kernels) if args.kernels else None
    close()
    seconds = statistics.median(times)
    tokens = args.batch * args.length * replicas
    width = args.hidden // args.heads
    layer = args.hidden * width * 2 * (args.heads + args.kv_heads) + 3 * args.hidden * args.intermediate
    flops = 6 * (args.layers * layer + args.vocab * args.hidden) * tokens
    flops += args.layers * 6 * args.hidden * args.length * tokens
    return {
        "ms": round(1e3 * seconds, 1),
        "tokens_per_s": round(tokens / seconds),
        "model_tflops_per_gpu": round(flops / seconds / world / 1e12, 1),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 1) if torch.cuda.is_available() else None,
        "losses": [round(losses[0], 4), round(losses[-1], 4)],
        **({} if kernels is None else {"kernels": kernels}),
    }


def kernel_times(step: Callable[[], object], count: int, steps: int = 2) -> list[dict[str, Any]]:
    """What takes most of this rank's device (or processor) in a step: milliseconds and calls."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(steps):
            step()
    dist.barrier()
    found = idle_times(profile.events(), steps)
    for event in profile.key_averages():
        on_device = event.self_device_time_total if torch.cuda.is_available() else event.self_cpu_time_total
        if on_device and (not torch.cuda.is_available() or event.device_type == torch.autograd.DeviceType.CUDA):
            found.append({"name": event.key[:90], "ms": on_device / steps / 1e3, "calls": event.count / steps})
    return sorted(found, key=lambda each: -each["ms"])[:count]


if __name__ == "__main__":
    main()
