"""What the records of a load say: times, throughput, errors, and goodput under objectives."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from phalanx.bench.serving.client import Record
from phalanx.bench.serving.load import Measured

LATE_MS = 10.0
"""A client that is later than this at its 99th percentile spoils what it measures."""

Objectives = dict[str, float]
"""Measure (ttft, tpot, e2e) to the seconds that it may take."""


def ttft(record: Record) -> float | None:
    """Seconds from sending to the first text."""
    return record.events[0] - record.sent if record.events else None


def e2e(record: Record) -> float:
    """Seconds from sending to the end of the stream."""
    return record.end - record.sent


def itl(record: Record) -> list[float]:
    """Seconds between events with text that follow each other."""
    return [later - earlier for earlier, later in itertools.pairwise(record.events)]


def tpot(record: Record) -> float | None:
    """Seconds a token after the first one; None of a single token, or where the server does not count."""
    if record.output_tokens is None or record.output_tokens < 2 or not record.events:
        return None
    return (record.events[-1] - record.events[0]) / (record.output_tokens - 1)


_MEASURES = {"ttft": ttft, "tpot": tpot, "e2e": e2e}


def parse_objectives(text: str) -> Objectives:
    """``ttft:200ms,tpot:50ms,e2e:2s``.

    Raises:
        ValueError: anything else.
    """
    found: Objectives = {}
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\w+):(\d+(?:\.\d+)?)(ms|s)\s*", part)
        if match is None or match[1] not in _MEASURES or match[1] in found:
            known = ", ".join(_MEASURES)
            raise ValueError(f"{part!r} of {text!r} is no objective: write ttft:200ms,tpot:50ms (known are {known})")
        found[match[1]] = float(match[2]) * (0.001 if match[3] == "ms" else 1)
    return found


def meets(record: Record, objectives: Objectives) -> bool:
    """Whether an answer came, and in time. What it does not have (a single token has no time between tokens) counts as
    in time."""
    if record.error:
        return False
    for name, limit in objectives.items():
        value = _MEASURES[name](record)
        if value is not None and value > limit:
            return False
    return True


def percentiles(seconds: Sequence[float]) -> dict[str, float] | None:
    """Mean, p50, p90, p95, p99 (linear between the two nearest values) and the largest, in milliseconds."""
    if not len(seconds):
        return None
    values = np.asarray(seconds) * 1000
    found = {"mean": values.mean(), "max": values.max()}
    found |= {f"p{share}": np.percentile(values, share) for share in (50, 90, 95, 99)}
    return {name: round(float(value), 3) for name, value in found.items()}


def figures(measured: Measured, objectives: Objectives) -> dict[str, Any]:
    """The figures of a load. Requests that were interrupted are counted, and otherwise left out; those that failed
    count for errors and goodput only."""
    whole = [record for record in measured.records if not record.interrupted]
    done = [record for record in whole if not record.error]
    seconds = max(measured.ended - measured.begun, 1e-9)
    # A sum over answers of which some are not counted would be wrong: there is none.
    tokens_in = _sum([record.prompt_tokens for record in done])
    tokens_out = _sum([record.output_tokens for record in done])
    good = sum(meets(record, objectives) for record in whole)
    return {
        "seconds": round(seconds, 4),
        "stopped": measured.stopped,
        "requests": {
            "completed": len(done),
            "failed": len(whole) - len(done),
            "interrupted": len(measured.records) - len(whole),
        },
        "errors": _errors(whole),
        "prompt_tokens": tokens_in,
        "output_tokens": tokens_out,
        "requests_per_s": round(len(done) / seconds, 3),
        "output_tok_per_s": None if tokens_out is None else _rate(tokens_out, seconds),
        "total_tok_per_s": None if tokens_in is None or tokens_out is None else _rate(tokens_in + tokens_out, seconds),
        "ttft_ms": percentiles([value for record in done if (value := ttft(record)) is not None]),
        "itl_ms": percentiles([gap for record in done for gap in itl(record)]),
        "tpot_ms": percentiles([value for record in done if (value := tpot(record)) is not None]),
        "e2e_ms": percentiles([e2e(record) for record in done]),
        "goodput": {
            "objectives_s": objectives,
            "requests_per_s": round(good / seconds, 3),
            "share": round(good / len(whole), 4) if whole else None,
        }
        if objectives
        else None,
        "client": {
            "loop_late_ms": percentiles(measured.lags),
            "sent_late_ms": percentiles([record.late for record in measured.records]),
        },
    }


def warnings(found: dict[str, Any]) -> list[str]:
    """What a reader of the figures must know."""
    told = []
    for name, what in (("loop_late_ms", "noticed what came"), ("sent_late_ms", "sent requests")):
        late = found["client"][name]
        if late and late["p99"] > LATE_MS:
            told.append(
                f"this client {what} late (p99 {late['p99']:.0f} ms, at most {late['max']:.0f} ms): times may be too "
                "long; use a machine with a free core, or less load"
            )
    if found["requests"]["completed"] and found["output_tokens"] is None:
        told.append("the server does not count tokens (no usage in its streams): figures of tokens are missing")
    return told


def per_request(measured: Measured) -> list[dict[str, Any]]:
    """One dict a request, in the order in which they were sent, for analyses of one's own."""
    return [
        {
            "sent_s": round(record.sent - measured.begun, 6),
            "late_s": round(record.late, 6),
            "event_s": [round(at - record.sent, 6) for at in record.events],
            "e2e_s": round(e2e(record), 6),
            "prompt_tokens": record.prompt_tokens,
            "output_tokens": record.output_tokens,
            "error": record.error,
            "interrupted": record.interrupted,
        }
        for record in sorted(measured.records, key=lambda record: record.sent)
    ]


def _errors(records: list[Record]) -> list[dict[str, Any]]:
    counts = Counter(record.error for record in records if record.error)
    examples = {record.error: record.message for record in records if record.error}
    return [{"kind": kind, "count": count, "example": examples[kind]} for kind, count in counts.most_common()]


def _sum(counts: list[int | None]) -> int | None:
    known = [count for count in counts if count is not None]
    return sum(known) if len(known) == len(counts) else None


def _rate(tokens: int, seconds: float) -> float:
    return round(tokens / seconds, 2)
