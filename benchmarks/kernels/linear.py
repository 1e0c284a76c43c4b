"""Checks the matrix products of CUDA against references, then times them beside cuBLAS and the memory's limit.

    python benchmarks/kernels/linear.py [--quick] [--output linear.json]

Times are of nodes of a CUDA graph that walks over copies of a weight larger than the L2 cache; GB/s counts the bytes of
the weight (in the layout that is read) alone.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from phalanx.ops.triton.support import multiprocessors
from phalanx.ops.triton.linear import Tile, few_rows, tile_for

SHAPES = {
    "8b qkv": (6144, 4096),
    "8b o": (4096, 4096),
    "8b gate_up": (28672, 4096),
    "8b down": (4096, 14336),
    "8b head": (128256, 4096),
    "1b qkv": (3072, 2048),
    "1b o": (2048, 2048),
    "1b gate_up": (16384, 2048),
    "1b down": (2048, 8192),
    "0.6b qkv": (4096, 1024),
    "0.6b o": (1024, 2048),
    "0.6b gate_up": (6144, 1024),
    "0.6b down": (1024, 3072),
    "0.6b head": (151936, 1024),
}
QUICK = ("8b qkv", "8b o", "8b gate_up", "8b down", "0.6b o")
ONE_ROW = (
    Tile(2, 2048, 4, 1),
    Tile(2, 2048, 4, 1, 2048),
    Tile(4, 1024, 4, 1, 2048),
    Tile(4, 2048, 8, 1, 2048),
    Tile(4, 1024, 4, 4, 1024),
)
FEW_ROWS = (
    Tile(16, 256, 4, 4, 1024),
    Tile(16, 256, 2, 4, 1024),
    Tile(32, 256, 4, 4, 1024),
    Tile(64, 128, 4, 4, 1024),
)
MORE_ROWS = (Tile(32, 128, 4, 4, 1024), Tile(64, 128, 4, 4, 1024), Tile(128, 64, 4, 4, 512))
COPIES_BYTES = 300 << 20
"""At least so many bytes of weights are walked over: several times the L2 cache."""

Row = dict[str, Any]


def per_launch(launches: Sequence[Callable[[], Any]], repeats: int = 7) -> float:
    """Median microseconds of one of the launches, all captured in one graph."""
    for launch in launches[:2]:
        launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in launches:
            launch()
    graph.replay()
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1000 / len(launches))
    return statistics.median(times)


def attempt(rows: list[Row], name: str, row: Row, function: Callable[[], Row]) -> None:
    """Adds a row of what the function measures; a failure is printed and is a row too."""
    try:
        rows.append({"variant": name, **row, **function()})
    except Exception as failure:
        traceback.print_exc(limit=3)
        rows.append({"variant": name, **row, "failed": f"{type(failure).__name__}: {str(failure)[:200]}"})


def relative(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


def copies_of(out_features: int, in_features: int) -> list[Tensor]:
    """Random bf16 weights of one shape, more than fit into the L2 cache."""
    count = min(64, max(2, -(-COPIES_BYTES // (2 * out_features * in_features))))
    return [
        torch.randn(out_features, in_features, device="cuda", dtype=torch.bfloat16) * in_features**-0.5
        for _ in range(count)
    ]


def check_linear() -> list[Row]:
    """Own kernels against float64 on odd shapes, with poisoned outputs."""
    found: list[Row] = []
    # Then torch.empty is filled with NaN.
    torch.use_deterministic_algorithms(True, warn_only=True)
    for case in [(1, 4096, 4096), (1, 37, 200), (8, 1000, 576), (17, 64, 14336), (64, 37, 72)]:
        attempt(found, "linear", shape_of(*case), partial(_linear_error, *case, gated=False))
        attempt(found, "gated", shape_of(*case), partial(_linear_error, *case, gated=True))
    torch.use_deterministic_algorithms(False)
    return found


def shape_of(rows: int, out_features: int, in_features: int) -> Row:
    return {"shape": f"{out_features}x{in_features}", "rows": rows}


def _linear_error(rows: int, out_features: int, in_features: int, gated: bool) -> Row:
    x = torch.randn(rows, in_features + 8, device="cuda", dtype=torch.bfloat16)[:, :in_features]
    weight = torch.randn(2 * out_features, in_features, device="cuda", dtype=torch.bfloat16) * in_features**-0.5
    bias = torch.randn(2 * out_features, device="cuda", dtype=torch.bfloat16)
    wanted = x.double() @ weight.double().T
    if gated:
        gate, up = wanted.chunk(2, -1)
        return {"error": relative(few_rows(x, weight, None, True), F.silu(gate) * up)}
    return {"error": relative(few_rows(x, weight, bias), wanted + bias.double())}


def walk(function: Callable[[Any], Any], weights: Sequence[Any], size: int) -> Row:
    """Times a function of a weight over its copies, each of `size` bytes."""
    count = max(len(weights), 16)
    us = per_launch([partial(function, weights[i % len(weights)]) for i in range(count)])
    return {"us": round(us, 2), "GB/s": round(size / us / 1000)}


def time_linear(names: Sequence[str], counts: Sequence[int]) -> list[Row]:
    """cuBLAS, the rule's choice and some others."""
    found: list[Row] = []
    for name in names:
        out_features, in_features = SHAPES[name]
        weights = copies_of(out_features, in_features)
        size = weights[0].nbytes
        for rows in counts:
            x = torch.randn(rows, in_features, device="cuda", dtype=torch.bfloat16)
            row = {"shape": name, "rows": rows}
            attempt(found, "cublas", row, partial(walk, partial(F.linear, x), weights, size))
            if rows > 64:
                continue
            tiles = ONE_ROW if rows == 1 else FEW_ROWS if rows <= 32 else MORE_ROWS
            rule = tile_for(rows, out_features, in_features, multiprocessors(x.device))
            for tile in dict.fromkeys((rule, *tiles)):
                label = f"{'rule ' if tile == rule else ''}{'/'.join(map(str, tile))}"
                attempt(found, label, row, partial(walk, partial(few_rows, x, bias=None, tile=tile), weights, size))
            if "gate_up" in name:
                fused = partial(few_rows, x, bias=None, gated=True)
                attempt(found, "gated, one kernel", row, partial(walk, fused, weights, size))
        del weights
        torch.cuda.empty_cache()
    return found


def limits() -> Row:
    """Device copy, read plus written, GB/s."""
    source = torch.randn(1 << 29, device="cuda", dtype=torch.bfloat16)
    target = torch.empty_like(source)
    us = per_launch([lambda: target.copy_(source)] * 4)
    return {"copy, GB/s": round(2 * source.nbytes / us / 1000)}


def show(rows: Sequence[Row]) -> None:
    """One line a row; of the variants of one case the fastest is marked."""
    best: dict[tuple[Any, Any], float] = {}
    for row in rows:
        if "us" in row:
            key = (row["shape"], row["rows"])
            best[key] = min(best.get(key, row["us"]), row["us"])
    for row in rows:
        mark = "*" if row.get("us") == best.get((row["shape"], row["rows"])) else " "
        rest = " ".join(f"{k}={v}" for k, v in row.items() if k not in ("shape", "rows", "variant"))
        print(f"{mark} {row['shape']:>22} {row['rows']:>5}  {row['variant']:<28} {rest}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer shapes")
    parser.add_argument("--output", type=Path, help="a JSON file to write")
    arguments = parser.parse_args()
    begin = time.time()
    names = QUICK if arguments.quick else tuple(SHAPES)
    report: Row = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "limits": limits()}
    sections: dict[str, Callable[[], list[Row]]] = {
        "checks": check_linear,
        "linear": lambda: time_linear(names, (1, 8, 64, 256)),
    }
    for section, function in sections.items():
        started = time.time()
        report[section] = function()
        print(f"{section}: {time.time() - started:.1f} s", flush=True)
    report["seconds"] = round(time.time() - begin, 1)
    if arguments.output:
        arguments.output.write_text(json.dumps(report, indent=1) + "\n")
    for section in sections:
        print(f"\n{section}")
        show(report[section])
    print(report["device"], report["limits"], f"{report['seconds']} s")


if __name__ == "__main__":
    main()
