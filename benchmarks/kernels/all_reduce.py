"""All-reduce between the GPUs of one machine over shared memory: checked, then timed beside NCCL in CUDA graphs.

torchrun --nproc_per_node 2 benchmarks/kernels/all_reduce.py [--quick] [--output PATH]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from phalanx.distributed.process_group import ProcessGroup
from phalanx.distributed.rendezvous import Rendezvous
from phalanx.distributed.symmetric import SymmetricMemory
from phalanx.ops.norm import reference_add_rms_norm

# Of one graph, one behind the other: what a call costs inside a decode step.
CALLS = 50


def expected_sum(group: ProcessGroup, x: Tensor) -> Tensor:
    """The sum in fp32 in the order of the ranks."""
    total = torch.zeros_like(x, dtype=torch.float32)
    for part in group.all_gather(x[None]):
        total += part.float()
    return total.to(x.dtype)


def check_eager(group: ProcessGroup, memory: SymmetricMemory, device: torch.device, rounds: int) -> str:
    """Calls back to back, of other sizes and numbers each time; the ranks drift apart in between."""
    sizes = torch.Generator().manual_seed(7)
    wrong = 0
    for dtype in (torch.bfloat16, torch.float32):
        counts = [int(2 ** (25 * float(torch.rand(1, generator=sizes)))) for _ in range(rounds)]
        given = [torch.randn(min(c, memory.max_bytes // dtype.itemsize), device=device).to(dtype) for c in counts]
        found = []
        for number, x in enumerate(given):
            if number % (17 + group.rank) == 0:
                torch.cuda._sleep(200_000)
            found.append(memory.all_reduce(x))
        memory.check()
        wrong += sum(not torch.equal(a, expected_sum(group, x)) for a, x in zip(found, given, strict=True))
    return verdict(wrong, f"{2 * rounds} calls back to back, odd sizes")


def check_norm(group: ProcessGroup, memory: SymmetricMemory, device: torch.device) -> str:
    wrong, worst = 0, 0.0
    torch.manual_seed(1)
    for rows, width in (
        (1, 4096),
        (8, 4096),
        (64, 4096),
        (3, 1000),
        (5, 8192),
        (16, 16384),
        (1500, 4096),
        (8192, 4096),
    ):
        # Equal on every rank: they are drawn before what is each rank's own.
        residual = torch.randn(rows, width, device=device).bfloat16()
        weight = torch.randn(width, device=device).bfloat16()
        own = torch.Generator(device).manual_seed(100 + group.rank)
        for _ in range(20 if rows < 100 else 3):
            x = torch.randn(rows, width, generator=own, device=device).bfloat16()
            normed, new = memory.all_reduce_add_rms_norm(x, residual, weight, 1e-5)
            wanted, wanted_new = reference_add_rms_norm(expected_sum(group, x), residual, weight, 1e-5)
            wrong += not torch.equal(new, wanted_new)
            both = group.all_gather(normed[None])
            wrong += any(not torch.equal(both[0], other) for other in both[1:])
            worst = max(worst, float((normed.float() - wanted.float()).norm() / wanted.float().norm()))
    memory.check()
    return verdict(wrong + (worst > 1e-2), f"with residual and norm, relative error {worst:.1e}")


def check_graph(group: ProcessGroup, memory: SymmetricMemory, device: torch.device, replays: int) -> str:
    """Chains in a graph, other numbers at each replay, with eager calls between the replays."""
    xs = [torch.empty(n, device=device, dtype=torch.bfloat16) for n in (4096, 1111, 64 * 4096, 3)]
    replay, outs = captured(lambda: [memory.all_reduce(x) for x in xs for _ in range(3)])
    wrong = 0
    for number in range(replays):
        for x in xs:
            x.normal_()
        replay()
        if number % 3 == 0:
            memory.all_reduce(xs[0])
        wanted = [expected_sum(group, x) for x in xs for _ in range(3)]
        wrong += sum(not torch.equal(a, b) for a, b in zip(outs, wanted, strict=True))
    memory.check()
    return verdict(wrong, f"{replays} replays of a graph with {len(outs)} calls")


def verdict(wrong: int, what: str) -> str:
    return f"{'ok  ' if wrong == 0 else f'WRONG ({wrong})'} {what}"


def captured(run: Callable[[], list[Tensor]]) -> tuple[Callable[[], None], list[Tensor]]:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin()
        outs = run()
        graph.capture_end()
    torch.cuda.current_stream().wait_stream(stream)
    return graph.replay, outs


def microseconds(group: ProcessGroup, call: Callable[[], object], repeats: int) -> float:
    """Median time of a call inside a graph of CALLS."""

    def run() -> list[Tensor]:
        for _ in range(CALLS):
            call()
        return []

    replay, _ = captured(run)
    times = []
    for _ in range(repeats):
        group.barrier()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / CALLS)
    return statistics.median(times)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    rendezvous = Rendezvous.from_env()
    device = torch.device("cuda", rendezvous.local_rank)
    torch.cuda.set_device(device)
    group = ProcessGroup(rendezvous, device, timeout=60.0)
    say = print if group.rank == 0 else (lambda *_, **__: None)
    # As large as can be, so that sizes beyond the usual bounds are timed too; without marked words, and with.
    memories = {
        "places": SymmetricMemory(group, device, max_bytes=128 << 20, words_bytes=0),
        "words": SymmetricMemory(group, device, max_bytes=128 << 20, words_bytes=2 << 20),
    }
    torch.manual_seed(group.rank)
    rounds, repeats = (100, 5) if options.quick else (1000, 20)
    failed = 0
    for kind, memory in memories.items():
        # Compiled on every rank before any of them waits for another in a kernel.
        for wide in range(5):
            memory.all_reduce(torch.ones(128 * 2048 << wide, device=device, dtype=torch.bfloat16))
            group.barrier()
        for check in (
            lambda memory=memory: check_eager(group, memory, device, rounds),
            lambda memory=memory: check_norm(group, memory, device),
            lambda memory=memory: check_graph(group, memory, device, rounds // 5),
        ):
            try:
                line = check()
            except Exception:
                line = f"WRONG {traceback.format_exc()}"
            failed += not line.startswith("ok")
            say(f"{line} ({kind})", flush=True)
    rows = []
    for size in (8 << 10, 64 << 10, 256 << 10, 512 << 10, 1 << 20, 2 << 20, 4 << 20, 16 << 20, 64 << 20):
        x = torch.randn(size // 2, device=device).bfloat16()
        row = {"bytes": size, "nccl_us": microseconds(group, lambda x=x: group.all_reduce(x), repeats)}
        lines = x.view(-1, 4096)
        residual, weight = torch.randn_like(lines), torch.ones(4096, device=device, dtype=torch.bfloat16)
        for kind, memory in memories.items():
            if kind == "words" and size > memory.words_bytes:
                continue
            row[f"{kind}_us"] = microseconds(group, lambda x=x, memory=memory: memory.all_reduce(x), repeats)
            row[f"{kind}_norm_us"] = microseconds(
                group,
                lambda a=lines, b=residual, c=weight, memory=memory: memory.all_reduce_add_rms_norm(a, b, c, 1e-5),
                repeats,
            )
        rows.append(row)
    for memory in memories.values():
        memory.check()
    columns = ("nccl_us", "places_us", "words_us", "places_norm_us", "words_norm_us")
    say(f"{group.size} ranks, bf16, us a call inside a graph of {CALLS}; norm: with residual and RMSNorm")
    say(f"{'bytes':>9}" + "".join(f"{name.removesuffix('_us'):>13}" for name in columns))
    for row in rows:
        say(f"{row['bytes']:9d}" + "".join(f"{row[n]:13.2f}" if n in row else f"{'-':>13}" for n in columns))
    if options.output is not None and group.rank == 0:
        options.output.write_text(json.dumps({"ranks": group.size, "failed": failed, "rows": rows}, indent=1))
    group.barrier()
    return failed


if __name__ == "__main__":
    code = 1
    try:
        code = min(main(), 1)
    except SystemExit:
        # Of --help, or of arguments that are wrong: argparse has said why.
        raise
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    # Graphs that hold NCCL's calls may hang in the interpreter's teardown.
    os._exit(code)
