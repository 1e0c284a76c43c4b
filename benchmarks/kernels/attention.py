"""Attention over the blocked KV cache on a GPU: checked against the reference, then timed beside its peers.

    python benchmarks/kernels/attention.py [--quick] [--output PATH]

Decodes run in CUDA graphs that were captured for contexts of up to 131072, over as many caches in turn as exceed the L2
cache. Every candidate setting is one variant; one that fails is reported and the others go on.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from phalanx.ops.triton import attention as triton_attention
from phalanx.ops.triton.attention import Call, Splits, Tile
from phalanx.ops.triton.attention_invariant import count_pieces, invariant_attention, num_programs, walk_pieces
from tests.ops.triton.attention_case import check_written, exact, ragged, relative_error

BOUND = 131072
BLOCK = 16
BUDGET = 115.0
BEGAN = time.monotonic()
DEVICE = torch.device("cuda")
DECODES: list[tuple[int, int | range]] = [
    (1, 1024),
    (1, 32768),
    (8, 1024),
    (8, 8192),
    (32, range(200, 1501)),
    # As a batch is when a part of its requests have ended.
    (52, range(950, 2051)),
    (77, range(800, 1801)),
    (128, range(200, 1501)),
    (256, range(200, 1501)),
    (64, 1024),
    (64, 4096),
    (256, 1024),
]
DECODE_CANDIDATES = {
    "64 4w 3s": Tile(0, 64, 4, 3),
    "64 4w 2s": Tile(0, 64, 4, 2),
    "128 4w 3s": Tile(0, 128, 4, 3),
    "32 2w 4s": Tile(0, 32, 2, 4),
    "32 4w 4s": Tile(0, 32, 4, 4),
}
PREFILL_CANDIDATES = {
    "128x64 8w 3s": Tile(128, 64, 8, 3),
    "128x128 8w 2s": Tile(128, 128, 8, 2),
    "128x64 8w 5s": Tile(128, 64, 8, 5),
    "64x64 4w 3s": Tile(64, 64, 4, 3),
    "64x128 4w 3s": Tile(64, 128, 4, 3),
}
Result = dict[str, Any]


def variant(results: list[Result], measure: Callable[[], Result], **named: Any) -> None:
    """One variant's result; a failure becomes part of it. Past the time that there is, variants are skipped."""
    result: Result = dict(named)
    results.append(result)
    try:
        if time.monotonic() - BEGAN > BUDGET:
            raise TimeoutError("skipped: no time left")
        result |= measure()
    except Exception as error:
        result["failed"] = f"{type(error).__name__}: {error}"[:300]
    print(json.dumps(result), flush=True)


def check(results: list[Result], quick: bool) -> None:
    """Random ragged batches against the reference in float64, NaN around them; and bits of the invariant mode."""
    decodes = [(1, 700), (1, 0), (0, 7), (1, 3000), (1, 64)]
    mixed = [(1, 2000), (0, 3), (300, 0), (1, 5), (2, 400), (37, 3000)]
    bf16, f16, f32 = torch.bfloat16, torch.float16, torch.float32
    cases: list[tuple[Any, ...]] = [
        (decodes, 32, 8, 128, bf16, {"padding": 3, "bound": BOUND}),
        (mixed, 32, 8, 128, bf16, {"padding": 3}),
        (mixed, 16, 2, 128, bf16, {"cache_dtype": torch.float8_e4m3fn}),
        (decodes, 16, 2, 128, bf16, {"cache_dtype": torch.float8_e4m3fn, "bound": BOUND}),
        (mixed, 4, 1, 64, f32, {"padding": 1}),
    ]
    if not quick:
        cases += [
            (mixed, 8, 8, 96, f16, {"window": 100, "soft_cap": 3.0}),
            (decodes, 71, 1, 64, bf16, {"biased": True, "block_size": 5}),
            (mixed, 8, 1, 256, bf16, {"window": 512, "block_size": 256}),
            (mixed, 16, 1, 80, bf16, {"biased": True}),
            (decodes, 6, 2, 256, f32, {"window": 200}),
        ]
    functions = {"triton": triton_attention.attention, "invariant": invariant_attention}
    for number, (sizes, heads, kv_heads, size, dtype, options) in enumerate(cases):
        case = ragged(sizes, heads, kv_heads, size, dtype=dtype, device=DEVICE, seed=number, **options)
        shape = f"{'decode' if sizes is decodes else 'mixed'} {heads}/{kv_heads} d{size} {dtype} {options}"
        for name, function in functions.items():
            variant(results, partial(compare, function, case), check=name, case=shape)
    for dtype in (bf16, f32):
        variant(results, partial(check_bits, dtype), check="bits of the invariant mode", case=str(dtype))


def compare(function: Callable[..., torch.Tensor], case: dict[str, Any]) -> Result:
    error = relative_error(check_written(function, case), exact(case))
    if not error < (1e-5 if case["q"].dtype == torch.float32 else 1e-2):
        raise ValueError(f"relative error {error}")
    return {"error": error}


def check_bits(dtype: torch.dtype) -> Result:
    """Rows of a mixed batch again as decodes and as chunks, alone; ValueError where any bit differs."""
    sizes = [(1, 5000), (300, 2500), (40, 10), (1, 70)]
    case = ragged(sizes, 32, 8, 128, dtype=dtype, device=DEVICE)
    call = Call(**{name: value for name, value in case.items() if not name.startswith("max_")}, key_bias=None)
    walk_pieces(call, count_pieces(case["max_seq_len"]), 1)
    together, rows = call.out.clone(), 0
    for programs in (2, 7, num_programs(call, count_pieces(BOUND))):
        walk_pieces(call, count_pieces(BOUND), programs)
        if not torch.equal(call.out, together):
            raise ValueError(f"{programs} programs a tile give other bits than one")
    for sequence, length, last in [
        (0, 1, 5000),
        *((1, 1, p) for p in range(2500, 2800, 23)),
        (1, 33, 2700),
        (2, 9, 30),
    ]:
        first = int(case["cu_seqlens_q"][sequence]) + last - length + 1 - sizes[sequence][1]
        alone = case | {
            "q": case["q"][first : first + length],
            "block_table": case["block_table"][sequence : sequence + 1],
            "cu_seqlens_q": torch.tensor([0, length], dtype=torch.int32, device=DEVICE),
            "seq_lens": torch.tensor([last + 1], dtype=torch.int32, device=DEVICE),
            "max_query_len": length,
            "max_seq_len": BOUND,
        }
        if not torch.equal(invariant_attention(**alone), together[first : first + length]):
            raise ValueError(f"position {last}, {length} tokens: other bits alone than in a batch")
        rows += length
    return {"rows": rows}


def microseconds(runs: list[Callable[[], Any]], repeat: int = 15) -> float:
    """Median time of one run: all of them in one CUDA graph, replayed."""
    for run in runs[:2]:
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for run in runs:
            run()
    graph.replay()
    times = []
    for _ in range(repeat):
        before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        before.record()
        graph.replay()
        after.record()
        after.synchronize()
        times.append(before.elapsed_time(after) * 1e3 / len(runs))
    return statistics.median(times)


def batch(
    queries: list[int], contexts: list[int], heads: int, kv_heads: int, caches: int, dtype: torch.dtype = torch.bfloat16
) -> list[dict[str, Any]]:
    """The same batch over several caches: arguments of `Call`, contexts in blocks that lie in no order."""
    columns = -(-max(contexts) // BLOCK)
    needed = [-(-length // BLOCK) for length in contexts]
    cu_seqlens = torch.tensor([0, *queries], device=DEVICE).cumsum(0).to(torch.int32)
    q = torch.randn(sum(queries), heads, 128, device=DEVICE, dtype=torch.bfloat16)
    made = []
    for _ in range(caches):
        order = torch.randperm(sum(needed), device=DEVICE).to(torch.int32)
        table = torch.zeros(len(contexts), columns, dtype=torch.int32, device=DEVICE)
        for s, own in enumerate(order.split(needed)):
            table[s, : len(own)] = own
        pool = torch.randn(sum(needed), 2, BLOCK, kv_heads, 128, device=DEVICE, dtype=torch.bfloat16).to(dtype)
        made.append({
            "q": q,
            "k_cache": pool[:, 0],
            "v_cache": pool[:, 1],
            "block_table": table,
            "cu_seqlens_q": cu_seqlens,
            "seq_lens": torch.tensor(contexts, dtype=torch.int32, device=DEVICE),
            "scale": 128**-0.5,
        })  # fmt: skip
    return made


def as_call(arguments: dict[str, Any]) -> Call:
    return Call(**arguments, window=None, soft_cap=None, key_bias=None)


def time_decodes(results: list[Result], quick: bool) -> None:
    for sequences, context in DECODES:
        time_decode(results, quick, 32, sequences, context)
    for sequences, context in [] if quick else DECODES[-3:]:
        time_decode(results, True, 16, sequences, context)


def time_decode(results: list[Result], quick: bool, heads: int, sequences: int, context: int | range) -> None:
    """One point: as served, in the invariant mode, with an fp8 cache, and with each candidate setting. A range: every
    sequence has a context of its own in it."""
    chance = random.Random(sequences)
    contexts = [chance.choice(context) if isinstance(context, range) else context for _ in range(sequences)]
    size = sum(contexts) * 8 * 128 * 2 * 2
    lengths = [1] * sequences, contexts
    batches = batch(*lengths, heads, 8, min(64, max(2, -(-300_000_000 // size))))
    calls = [as_call(b) for b in batches]
    named = f"{context[0]} to {context[-1]}" if isinstance(context, range) else str(context)
    point = {"decode": f"{sequences} x {named}", "heads": f"{heads}/8"}

    def measure(runs: list[Callable[[], Any]], read: int = size) -> Result:
        us = microseconds(runs)
        return {"us": round(us, 1), "GB/s": round(read / us / 1e3)}

    def served(function: Callable[..., Any], batches: list[dict[str, Any]]) -> list[Callable[[], Any]]:
        return [partial(function, **b, max_query_len=1, max_seq_len=BOUND) for b in batches]

    variant(results, lambda: measure(served(triton_attention.attention, batches)), **point, variant="as served")
    variant(results, lambda: measure(served(invariant_attention, batches)), **point, variant="invariant")
    if heads == 32 and (sequences, context) in ((1, 1024), (64, 4096)):
        narrow = batch(*lengths, heads, 8, len(batches), torch.float8_e4m3fn)
        runs = served(triton_attention.attention, narrow)
        variant(results, lambda: measure(runs, size // 2), **point, variant="fp8 cache")
    splits = triton_attention.decode_splits(calls[0], BOUND)
    most, fewest = splits.most, splits.min_keys
    usual = next(name for name, tile in DECODE_CANDIDATES.items() if tile == splits.tiles[2][128])
    tried = [(name, splits) for name in ([usual] if quick else DECODE_CANDIDATES)]
    others = [(most * 2, fewest), (most * 4, fewest), (max(1, most // 2), fewest)]
    others += [(most, fewest * 2), (most, fewest // 2)]
    tried += [(usual, Splits(*other, splits.programs)) for other in others]
    for name, splits in tried:
        tile = DECODE_CANDIDATES[name]
        runs = [partial(triton_attention.decode, c, sequences, sequences, splits, tile) for c in calls]
        title = f"{name}, {splits.most} splits of {splits.min_keys}+"
        variant(results, partial(measure, runs), **point, variant=title)


def time_prefills(results: list[Result]) -> None:
    time_prefill(results, "8 x 1024", [1024] * 8, [1024] * 8)
    time_prefill(results, "1 x 8192", [8192], [8192])
    time_prefill(results, "7936 + 256 decodes at 1024", [7936] + [1] * 256, [7936] + [1024] * 256)


def time_prefill(results: list[Result], name: str, queries: list[int], contexts: list[int]) -> None:
    """One batch, each candidate setting, and torch's own kernels where the batch is one that they take."""
    pairs = sum((c * (c + 1) - (c - n) * (c - n + 1)) // 2 for n, c in zip(queries, contexts, strict=True))
    (arguments,) = batch(queries, contexts, 32, 8, 1)
    arguments_served = arguments | {"max_query_len": max(queries), "max_seq_len": max(contexts)}
    mixed, call = len(set(queries)) > 1, as_call(arguments)

    def measure(run: Callable[[], Any]) -> Result:
        us = microseconds([run] * 3)
        return {"us": round(us, 1), "TFLOP/s": round(4 * 32 * 128 * pairs / us / 1e6)}

    def add(title: str, run: Callable[[], Any]) -> None:
        variant(results, lambda: measure(run), prefill=name, variant=title)

    add("as served", partial(triton_attention.attention, **arguments_served))
    add("invariant", partial(invariant_attention, **arguments_served))
    for candidate, tile in PREFILL_CANDIDATES.items():
        title = f"{candidate}, without the decodes" if mixed else candidate
        add(title, partial(triton_attention.prefill, call, mixed, tile))
    if mixed:
        add("decodes in the prefill kernel", partial(triton_attention.prefill, call, False))
        return
    q = torch.randn(len(queries), 32, queries[0], 128, device=DEVICE, dtype=torch.bfloat16)
    k, v = torch.randn(2, len(queries), 32, queries[0], 128, device=DEVICE, dtype=torch.bfloat16)

    def peer(backend: SDPBackend) -> None:
        with sdpa_kernel(backend):
            F.scaled_dot_product_attention(q, k, v, is_causal=True)

    for backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION):
        add(f"torch {backend.name}, unpaged", partial(peer, backend))


def copy_limit() -> float:
    """GB/s read and written by a device copy."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device=DEVICE).random_()
    target = torch.empty_like(source)
    return 2 * source.numel() / microseconds([lambda: target.copy_(source)] * 4) / 1e3


def table(results: list[Result], limit: float) -> None:
    print(f"\n{torch.cuda.get_device_name()}; copy limit {limit:.0f} GB/s; {time.monotonic() - BEGAN:.0f} s")
    failed = [r for r in results if "failed" in r]
    print(f"checks passed: {sum('check' in r and 'failed' not in r for r in results)}; failed: {len(failed)}")
    for result in failed:
        print("  FAILED", json.dumps(result))
    for kind, unit in (("decode", "GB/s"), ("prefill", "TFLOP/s")):
        for result in results:
            if kind in result and "failed" not in result:
                what = " ".join(str(result[key]) for key in (kind, "heads") if key in result)
                share = f" {result[unit] / limit:5.2f}" if kind == "decode" else ""
                print(f"{kind} {what:30} {result['variant']:40} {result['us']:9.1f} us {result[unit]:6} {unit}{share}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer cases and candidates")
    parser.add_argument("--output", type=Path, help="where the results go as JSON")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("a CUDA device is needed")
    torch.manual_seed(0)
    results: list[Result] = []
    check(results, arguments.quick)
    limit = copy_limit()
    time_prefills(results)
    time_decodes(results, arguments.quick)
    table(results, limit)
    if arguments.output is not None:
        arguments.output.write_text(json.dumps({"copy_GB/s": limit, "results": results}, indent=1))


if __name__ == "__main__":
    main()
