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
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from phalanx.ops.activation import gated_activation
from phalanx.ops.linear import PreparedWeight, linear, prepare_linear, restore_weight
from phalanx.ops.moe import MaskedExperts, SortedExperts, route
from phalanx.ops.quantized import LAYOUTS, quantize_fp8
from phalanx.ops.triton.fp8_linear import quantize_rows
from phalanx.ops.triton.grouped import GroupedExperts
from phalanx.ops.triton.invariant import partial as partial_sum
from phalanx.ops.triton.invariant import tree_sum
from phalanx.ops.triton.linear import RowsTile, RowTile, few_rows, one_row, tile_for
from phalanx.ops.triton.quantized_linear import Tile
from phalanx.ops.triton.quantized_linear import few_rows as quantized_rows

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
    RowTile(2, 2048, 8, 2),
    RowTile(2, 2048, 4, 2),
    RowTile(4, 2048, 4, 2),
    RowTile(2, 2048, 4, 0),
    RowTile(1, 2048, 2, 0),
)
QUANTIZED = (Tile(16, 256, 4, 5, 2048), Tile(32, 256, 4, 5, 2048), Tile(64, 256, 4, 4, 2048), Tile(64, 128, 4, 5, 1024))
FP8_ROWS = (
    RowsTile(16, 64, 512, 3, True, 2048),
    RowsTile(32, 64, 512, 3, True, 2048),
    RowsTile(64, 64, 128, 6, True, 2048),
    RowsTile(64, 32, 512, 4, False, 2048),
    RowsTile(64, 64, 256, 5, False, 2048),
)
QUANTIZED_SHAPES = ("8b qkv", "8b o", "8b gate_up", "8b down")
EXPERTS = {"mixtral, half as wide": (8, 2, 2048, 7168), "qwen3 30b-a3b": (128, 8, 2048, 768)}
"""Experts, those of a token, hidden size, an expert's width."""
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
    for case in [(1, 4096, 4096), (1, 37, 200), (1, 1000, 576), (1, 64, 14336)]:
        attempt(found, "linear", shape_of(*case), partial(_linear_error, *case))
    torch.use_deterministic_algorithms(False)
    return found


def shape_of(rows: int, out_features: int, in_features: int) -> Row:
    return {"shape": f"{out_features}x{in_features}", "rows": rows}


def _linear_error(rows: int, out_features: int, in_features: int) -> Row:
    x = torch.randn(rows, in_features + 8, device="cuda", dtype=torch.bfloat16)[:, :in_features]
    weight = torch.randn(out_features, in_features, device="cuda", dtype=torch.bfloat16) * in_features**-0.5
    bias = torch.randn(out_features, device="cuda", dtype=torch.bfloat16)
    return {"error": relative(one_row(x, weight, bias), x.double() @ weight.double().T + bias.double())}


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
            if rows > 1:
                continue
            rule = tile_for(in_features)
            # A loop that is written out has as many steps as the weight needs.
            others = [tile for tile in ONE_ROW if tile.steps in (0, -(-in_features // tile.inner))]
            for tile in dict.fromkeys((rule, *others)):
                label = f"{'rule ' if tile == rule else ''}{'/'.join(map(str, tile))}"
                attempt(found, label, row, partial(walk, partial(one_row, x, bias=None, tile=tile), weights, size))
        del weights
        torch.cuda.empty_cache()
    return found


def time_quantized(names: Sequence[str], counts: Sequence[int]) -> list[Row]:
    """Quantised layouts beside bf16; GB/s counts the bytes that the layout has."""
    found: list[Row] = []
    for name in names:
        dense = copies_of(*SHAPES[name])
        for layout in (None, *LAYOUTS):
            weights = [prepare_linear(w, layout=layout) for w in dense]
            size = sum(t.nbytes for t in (weights[0].data, *weights[0].aux.values()))
            for rows in counts:
                x = torch.randn(rows, SHAPES[name][1], device="cuda", dtype=torch.bfloat16)
                row = {"shape": name, "rows": rows}
                launch = partial(linear, x)
                attempt(found, layout or "bf16", row, partial(_quantized, launch, weights, size, layout, x))
                if layout is None or rows > 64:
                    continue
                if layout == "fp8":
                    numbers, scale = quantize_rows(x)
                    for fp8_tile in FP8_ROWS if rows > 1 else ():
                        other = partial(_fp8_rows, numbers, scale, fp8_tile)
                        label = f"fp8 {'/'.join(map(str, fp8_tile))}"
                        attempt(found, label, row, partial(walk, other, weights, size))
                    attempt(
                        found,
                        "fp8, quantising alone",
                        row,
                        partial(walk, lambda _, x=x: quantize_rows(x), weights, size),
                    )
                    continue
                for tile in QUANTIZED:
                    other = partial(quantized_rows, x, bias=None, tile=tile)
                    label = f"{layout} {'/'.join(map(str, tile))}"
                    attempt(found, label, row, partial(walk, other, weights, size))
            del weights
        del dense
        torch.cuda.empty_cache()
    return found


def _quantized(launch: Callable[[Any], Any], weights: Sequence[Any], size: int, layout: str | None, x: Tensor) -> Row:
    """Time, and the error against a plain product with what the weight stands for."""
    measured = walk(launch, weights, size)
    if layout is not None:
        seen = x.float()
        if layout == "fp8":
            numbers, scale = quantize_fp8(x)
            seen = numbers.float() * scale[:, None]
        wide = replace(weights[0], dtype=torch.float32, reader=layout)
        measured["error"] = round(relative(launch(weights[0]), seen.double() @ restore_weight(wide).double().T), 5)
    return measured


def time_invariant(names: Sequence[str], counts: Sequence[int]) -> list[Row]:
    """The batch-invariant product: time, and whether each of some rows is bit-equal alone."""
    found: list[Row] = []
    for name in names:
        weights = [prepare_linear(w, forced="invariant") for w in copies_of(*SHAPES[name])]
        for rows in counts:
            x = torch.randn(rows, SHAPES[name][1], device="cuda", dtype=torch.bfloat16)
            row = {"shape": name, "rows": rows}
            attempt(found, "invariant", row, partial(_invariant, x, weights))
        del weights
        torch.cuda.empty_cache()
    return found


def _fp8_rows(numbers: Tensor, scale: Tensor, tile: RowsTile, weight: PreparedWeight) -> Tensor:
    return few_rows(numbers, weight.data, None, weight.dtype, tile, (scale, weight.aux["scale"]))


def _invariant(x: Tensor, weights: Sequence[Any]) -> Row:
    whole = linear(x, weights[0])
    alone = all(torch.equal(linear(x[r : r + 1], weights[0])[0], whole[r]) for r in range(0, x.shape[0], 7))
    parts = []
    for rank in range(2):
        half = weights[0].data.chunk(2, 1)[rank].contiguous()
        held = PreparedWeight(half, "plain", *half.shape, half.dtype)
        parts.append(partial_sum(x.chunk(2, 1)[rank].contiguous(), held, 2))
    shared = torch.equal(tree_sum(torch.stack(parts)).to(x.dtype), whole)
    return {**walk(partial(linear, x), weights, weights[0].data.nbytes), "alone": alone, "two ranks": shared}


def time_experts(counts: Sequence[int]) -> list[Row]:
    """All ways to compute experts; GB/s counts the weights of the experts that are asked for."""
    found: list[Row] = []
    for name, (experts, top_k, hidden, width) in EXPERTS.items():
        for backend in (GroupedExperts(), MaskedExperts(), SortedExperts()):
            label = type(backend).__name__
            first = backend.prepare((random_weight(2 * width, hidden) for _ in range(experts)), experts, "plain")
            second = backend.prepare((random_weight(hidden, width) for _ in range(experts)), experts, "plain")
            for tokens in counts:
                if label == "MaskedExperts" and tokens * experts > 40_000:
                    continue
                row = {"shape": name, "rows": tokens}
                attempt(found, label, row, partial(_experts, backend, first, second, tokens, top_k))
            del first, second
            torch.cuda.empty_cache()
    return found


def random_weight(out_features: int, in_features: int) -> Tensor:
    return torch.randn(out_features, in_features, device="cuda", dtype=torch.bfloat16) * in_features**-0.5


def _experts(backend: Any, first: Any, second: Any, tokens: int, top_k: int) -> Row:
    experts, out_features, hidden = first.shape
    x = torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16)
    routed = [route(torch.randn(tokens, experts, device="cuda"), top_k, True) for _ in range(8)]
    silu = partial(gated_activation, name="silu")

    def compute(given: tuple[Tensor, Tensor]) -> Tensor:
        out: Tensor = backend.apply(x, *given, first, second, silu)
        return out

    launches = [partial(compute, given) for given in routed]
    us = eager(launches) if isinstance(backend, SortedExperts) else per_launch(launches)
    used = statistics.mean(int(ids.unique().numel()) for _, ids in routed)
    size = used * 2 * hidden * (out_features + second.shape[2])
    measured: Row = {"us": round(us, 1), "GB/s": round(size / us / 1000)}
    if not isinstance(backend, SortedExperts):
        weights, ids = (given[:2] for given in routed[0])
        few = x[:2]
        wanted = sum_of_experts(few.double(), weights.double(), ids, first.data, second.data)
        measured["error"] = round(relative(compute(routed[0])[:2], wanted), 5)
    return measured


def sum_of_experts(x: Tensor, weights: Tensor, ids: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """The formula, token by token."""
    out = torch.zeros_like(x)
    for token in range(x.shape[0]):
        for weight, expert in zip(weights[token], ids[token].tolist(), strict=True):
            gate, up = (first[expert].double() @ x[token]).chunk(2)
            out[token] += weight * (second[expert].double() @ (F.silu(gate) * up))
    return out


def eager(launches: Sequence[Callable[[], Any]]) -> float:
    """Mean microseconds of a launch outside of graphs, which what reads on the host needs."""
    for launch in launches:
        launch()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for launch in launches:
        launch()
    torch.cuda.synchronize()
    return (time.perf_counter() - begin) * 1e6 / len(launches)


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
    parser.add_argument("--only", nargs="+", help="sections: checks, linear, quantized, invariant, experts")
    arguments = parser.parse_args()
    begin = time.time()
    names = QUICK if arguments.quick else tuple(SHAPES)
    report: Row = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "limits": limits()}
    sections: dict[str, Callable[[], list[Row]]] = {
        "checks": check_linear,
        "linear": lambda: time_linear(names, (1, 8, 64, 256)),
        "quantized": lambda: time_quantized(QUANTIZED_SHAPES, (1, 8, 32, 64, 256)),
        "invariant": lambda: time_invariant(("8b qkv", "8b down"), (1, 64, 1024)),
        "experts": lambda: time_experts((1, 64) if arguments.quick else (1, 8, 64, 1024)),
    }
    chosen = arguments.only or sections
    for section, function in sections.items():
        if section not in chosen:
            continue
        started = time.time()
        report[section] = function()
        print(f"{section}: {time.time() - started:.1f} s", flush=True)
    report["seconds"] = round(time.time() - begin, 1)
    if arguments.output:
        arguments.output.write_text(json.dumps(report, indent=1) + "\n")
    for section in (section for section in sections if section in chosen):
        print(f"\n{section}")
        show(report[section])
    print(report["device"], report["limits"], f"{report['seconds']} s")


if __name__ == "__main__":
    main()
