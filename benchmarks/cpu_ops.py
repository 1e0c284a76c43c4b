"""The native CPU ops beside PyTorch's: how long each takes at the shapes of SmolLM2-135M, next to the machine's peak.

    python benchmarks/cpu_ops.py --threads 1
    python benchmarks/cpu_ops.py --only linear --rows 32 --output benchmarks/out/cpu_ops.json

The contenders take turns, call by call, on rotating weights and caches that no cache level holds; a figure is the time
that nine calls in ten exceed, which a busy machine changes least.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from phalanx.ops import registry
from phalanx.ops.cpu.compiler import processor
from phalanx.ops.cpu.library import kernels, library
from phalanx.ops.linear import linear, prepare_linear

HEADS, KV_HEADS, HEAD_DIM, HIDDEN, INNER, BLOCK = 9, 3, 64, 576, 1536, 16
SHAPES = {"qkv": (960, 576), "attn_out": (576, 576), "gate_up": (3072, 576), "down": (576, 1536), "head": (49152, 576)}
BATCHES = {
    "decode 32 x 300": [(1, 299)] * 32,
    "decode 1 x 300": [(1, 299)],
    "decode 8 x 2000": [(1, 1999)] * 8,
    "prompt 512": [(512, 0)],
    "480 of a prompt + 32 decodes": [(480, 0)] + [(1, 299)] * 32,
    "512 more at 3500": [(512, 3500)],
}
FOOTPRINT = 100e6  # bytes of weights or caches that a contender rotates through

Call = Callable[[int], Any]


def times(contenders: dict[str, Call], seconds: float) -> dict[str, float]:
    """Seconds a call of each, taking turns; call i may use its i-th copy of the data."""
    taken: dict[str, list[float]] = {name: [] for name in contenders}
    end, turn = time.perf_counter() + seconds, 0
    while time.perf_counter() < end or turn < 5:
        for name, call in contenders.items():
            begin = time.perf_counter()
            call(turn)
            taken[name].append(time.perf_counter() - begin)
        turn += 1
    return {name: sorted(found)[len(found) // 10] for name, found in taken.items()}


def peak(dtype: torch.dtype, seconds: float) -> float:
    """GFLOP/s of PyTorch's own product of large matrices."""
    a, b = torch.randn(2, 1536, 1536).to(dtype)
    return 2 * 1536**3 / times({"": lambda _: a @ b}, seconds)[""] / 1e9


def with_unit(amx: bool, call: Call) -> Call:
    """The call on the tile unit, or on vectors."""

    def run(turn: int) -> None:
        kernels().amx = amx
        call(turn)

    return run


def linear_rows(name: str, rows: int, dtype: torch.dtype, seconds: float) -> dict[str, float]:
    """GFLOP/s of every way to multiply `rows` rows with the weight `name`."""
    out_features, in_features = SHAPES[name]
    size = torch.empty(0, dtype=dtype).element_size()
    copies = max(1, int(FOOTPRINT / (out_features * in_features * size)))
    weights = [torch.randn(out_features, in_features).to(dtype) for _ in range(copies)]
    x = torch.randn(rows, in_features).to(dtype)
    contenders: dict[str, Call] = {"F.linear": lambda i: F.linear(x, weights[i % copies])}
    if dtype == torch.float32 and torch.backends.mkl.is_available():
        packed = [torch.ops.mkl._mkl_reorder_linear_weight(w, rows) for w in weights]
        contenders["MKL packed"] = lambda i: torch.ops.mkl._mkl_linear(
            x, packed[i % copies], weights[i % copies], None, rows
        )
    elif torch.backends.mkldnn.is_available():
        packed = [torch.ops.mkldnn._reorder_linear_weight(w, rows) for w in weights]
        contenders["oneDNN packed"] = lambda i: torch.ops.mkldnn._linear_pointwise(
            x, packed[i % copies], None, "none", [], ""
        )
    if library() is not None:
        panels = [prepare_linear(w, forced="panels") for w in weights]
        contenders["native, vectors"] = with_unit(False, lambda i: linear(x, panels[i % copies]))
        if kernels().amx:
            contenders["native"] = with_unit(True, lambda i: linear(x, panels[i % copies]))
            if dtype == torch.float32:
                narrow = [prepare_linear(w.bfloat16().float(), forced="panels") for w in weights]
                contenders["native, bf16 values"] = with_unit(True, lambda i: linear(x, narrow[i % copies]))
    operations = 2 * rows * out_features * in_features
    return {name: operations / taken / 1e9 for name, taken in times(contenders, seconds).items()}


def attention_batch(sizes: list[tuple[int, int]], dtype: torch.dtype, seconds: float) -> dict[str, float]:
    """Microseconds of every attention for sequences of (new tokens, tokens in the cache)."""
    lengths = [new + old for new, old in sizes]
    blocks = [-(-length // BLOCK) for length in lengths]
    shape = (sum(blocks), BLOCK, KV_HEADS, HEAD_DIM)
    size = torch.empty(shape, dtype=dtype, device="meta").nbytes
    layers = max(1, min(30, int(FOOTPRINT / 2 / size)))
    caches = [torch.randn(2, *shape).to(dtype) for _ in range(layers)]
    table = torch.zeros(len(sizes), max(blocks), dtype=torch.int32)
    for row, own in zip(table, torch.randperm(shape[0]).to(torch.int32).split(blocks), strict=True):
        row[: len(own)] = own
    starts = torch.tensor([0] + [new for new, _ in sizes]).cumsum(0).to(torch.int32)
    q = torch.randn(int(starts[-1]), HEADS, HEAD_DIM).to(dtype)
    rest = (table, starts, torch.tensor(lengths, dtype=torch.int32))
    options = {"scale": 0.125, "max_query_len": max(new for new, _ in sizes), "max_seq_len": max(lengths)}

    def call(function: Callable[..., Tensor]) -> Call:
        return lambda i: function(q, *caches[i % layers], *rest, **options)

    return {name: 1e6 * taken for name, taken in times(implementations("attention", dtype, call), seconds).items()}


def pointwise(rows: int, dtype: torch.dtype, seconds: float) -> dict[str, dict[str, float]]:
    """Microseconds of the small ops for `rows` tokens."""
    x, residual = torch.randn(2, rows, HIDDEN).to(dtype)
    weight, gate_up = torch.ones(HIDDEN, dtype=dtype), torch.randn(rows, 2 * INNER).to(dtype)
    fused = torch.randn(rows, HEADS + 2 * KV_HEADS, HEAD_DIM).to(dtype)
    q, k, v = fused.split([HEADS, KV_HEADS, KV_HEADS], 1)
    angle = torch.rand(rows, HEAD_DIM // 2)
    cos, sin, slots = angle.cos(), angle.sin(), torch.randperm(rows)
    caches = torch.zeros(2, -(-rows // BLOCK), BLOCK, KV_HEADS, HEAD_DIM, dtype=dtype)
    calls: dict[str, Callable[[Any], Call]] = {
        "rms_norm": lambda f: lambda i: f(x, weight, 1e-5),
        "add_rms_norm": lambda f: lambda i: f(x, residual, weight, 1e-5),
        "gated_activation": lambda f: lambda i: f(gate_up, "silu"),
        "rope_write_kv": lambda f: lambda i: f(q, k, v, cos, sin, slots, *caches),
    }
    found = {op: times(implementations(op, dtype, call), seconds) for op, call in calls.items()}
    return {op: {name: 1e6 * taken for name, taken in by_name.items()} for op, by_name in found.items()}


def implementations(op: str, dtype: torch.dtype, call: Callable[[Any], Call]) -> dict[str, Call]:
    """A call of every implementation of an op that can run here."""
    device = torch.device("cpu")
    able = [i for i in registry.implementations(op) if i.supports(device, dtype)]
    return {i.name: call(i.function) for i in able}


def show(title: str, figures: dict[str, float], unit: str) -> None:
    """One line of the table."""
    cells = "  ".join(f"{name} {value:,.1f}" for name, value in figures.items())
    print(f"{title:<48} {unit:<8} {cells}", flush=True)


def main() -> None:
    """Measures what the arguments ask for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=1.0, help="of every measurement")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 16, 32, 64, 128, 256, 512])
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"], choices=["float32", "bfloat16"])
    parser.add_argument("--only", nargs="+", default=["linear", "attention", "pointwise"])
    parser.add_argument("--output", "--json", type=Path, help="write the figures to this file")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    amx = library() is not None and kernels().amx
    results: dict[str, Any] = {
        "settings": {name: str(value) for name, value in vars(given).items()},
        "machine": {
            "processor": processor(),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "amx": amx,
        },
    }
    for name in given.dtype:
        dtype = getattr(torch, name)
        found = results[name] = {"peak": peak(dtype, given.seconds)}
        show(f"{name}: product of 1536 x 1536 matrices", {"PyTorch": found["peak"]}, "GFLOP/s")
        if "linear" in given.only:
            for shape in SHAPES:
                for rows in given.rows:
                    figures = found[f"linear {shape} {rows}"] = linear_rows(shape, rows, dtype, given.seconds)
                    show(f"{name}: {shape} {SHAPES[shape]}, {rows} rows", figures, "GFLOP/s")
        if library() is not None:
            kernels().amx = amx
        if "attention" in given.only:
            for batch, sizes in BATCHES.items():
                figures = found[f"attention {batch}"] = attention_batch(sizes, dtype, given.seconds)
                show(f"{name}: attention, {batch}", figures, "us")
        if "pointwise" in given.only:
            for rows in given.rows:
                for op, figures in pointwise(rows, dtype, given.seconds).items():
                    found[f"{op} {rows}"] = figures
                    show(f"{name}: {op}, {rows} rows", figures, "us")
    if given.output is not None:
        given.output.parent.mkdir(parents=True, exist_ok=True)
        given.output.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
