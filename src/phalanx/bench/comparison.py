"""Contenders side by side: their figures, the ratio to the best of the others, and whether the answers agree."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from phalanx.bench.samples import Contender, Sample, figures
from phalanx.bench.workload import Plan

log = logging.getLogger("phalanx")

Opener = Callable[[], Contender]


def compare(
    plan: Plan,
    ours: Opener,
    peers: Sequence[tuple[str, str, Opener]],
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Runs the plan on each contender, one after the other, each alone.

    Args:
        ours: opens the first contender; its errors are raised.
        peers: (engine, mode, opener) of the others; one that fails is reported with its error.
        say: gets a line as each begins and ends, never while it is measured.

    Returns:
        ``results`` (a dict a contender), ``best_peer`` and ``ratio``: above 1, the first contender is faster.
    """
    first, samples = _measured(plan, "phalanx", ours, say)
    results = [first]
    for engine, mode, opener in peers:
        try:
            peer, theirs = _measured(plan, f"{engine} {mode}", opener, say)
        except Exception as error:
            # Whatever another engine raises is a fact about it, not a reason to lose the other figures.
            log.warning("%s %s failed: %s", engine, mode, error)
            results.append({"engine": engine, "mode": mode, "error": f"{type(error).__name__}: {error}"})
            continue
        pairs = zip(samples[0].answers, theirs[0].answers, strict=True)
        peer["identical_answers"] = sum(mine == other for mine, other in pairs)
        results.append(peer)
    rivals = [result for result in results[1:] if "error" not in result]
    return {"results": results, **_ratio(plan, first, rivals)}


def _measured(plan: Plan, name: str, opener: Opener, say: Callable[[str], None]) -> tuple[dict[str, Any], list[Sample]]:
    say(f"{name}: begins")
    begun = time.perf_counter()
    with opener() as contender:
        samples = contender.measure(plan)
        check_lengths(plan, samples)
        found = {"engine": contender.engine, "mode": contender.mode, **figures(plan, samples)}
        found.update({name: getattr(contender, name) for name in ("settings", "version") if hasattr(contender, name)})
    gc.collect()
    say(f"{name}: done in {time.perf_counter() - begun:.1f} s")
    return found, samples


def check_lengths(plan: Plan, samples: Sequence[Sample]) -> None:
    """Raises RuntimeError unless every answer has the length that was asked for: else the figures mean nothing."""
    for sample in samples:
        lengths = [len(answer) for answer in sample.answers]
        if lengths != plan.workload.output_lens:
            raise RuntimeError(f"answers of {sum(lengths)} tokens came, {plan.workload.output_tokens} were asked for")


def _ratio(plan: Plan, ours: dict[str, Any], rivals: list[dict[str, Any]]) -> dict[str, Any]:
    if not rivals:
        return {"best_peer": None, "ratio": None}
    if plan.kind == "latency":
        best = min(rivals, key=lambda result: result["inter_token_ms"]["p50"] or float("inf"))
        pairs = {name: (best[name]["p50"], ours[name]["p50"]) for name in ("first_token_ms", "inter_token_ms")}
    else:
        best = max(rivals, key=lambda result: result["output_tok_per_s"])
        pairs = {name: (ours[name], best[name]) for name in ("output_tok_per_s", "output_tok_per_core_s")}
    ratio = {name: round(top / bottom, 3) for name, (top, bottom) in pairs.items() if top and bottom}
    return {"best_peer": f"{best['engine']} {best['mode']}", "ratio": ratio}
