"""A measured load as a picture: how first tokens and gaps between tokens are distributed, and the run over time."""

from __future__ import annotations

from html import escape
from math import floor, log10
from typing import Any

import numpy as np

from phalanx.bench.serving.client import Record
from phalanx.bench.serving.figures import itl, ttft
from phalanx.bench.serving.load import Measured

_WIDTH, _HEIGHT, _MARGIN, _GAP = 960, 500, 24, 44
_BINS = 48
_TALLEST = 0.78  # of a histogram's height: above it is room for the percentiles
_COLOURS = {"ttft": "#c05f25", "itl": "#3b6fb6", "tokens": "#2b8a66", "open": "#8458b3"}
_STYLE = """
  text { font: 12px system-ui, -apple-system, "Segoe UI", "DejaVu Sans", Helvetica, Arial, sans-serif; fill: #1f2328; }
  .title { font-size: 16px; font-weight: 600; } .head { font-size: 13px; font-weight: 600; }
  .soft { fill: #59636e; } .back { fill: #ffffff; } .line { stroke: #d1d9e0; } .mark { stroke: #59636e; }
  @media (prefers-color-scheme: dark) {
    text { fill: #f0f6fc; } .soft { fill: #9198a1; } .back { fill: #0d1117; } .line { stroke: #3d444d; }
    .mark { stroke: #9198a1; }
  }
"""


def svg(measured: Measured, title: str, subtitle: str) -> str:
    """An SVG document, for light and dark pages."""
    done = [record for record in measured.records if not (record.error or record.interrupted)]
    firsts = [1000 * value for record in done if (value := ttft(record)) is not None]
    gaps = [1000 * gap for record in done for gap in itl(record)]
    half = (_WIDTH - 2 * _MARGIN - _GAP) / 2
    body = [
        f'<text class="title" x="{_MARGIN}" y="36">{escape(title)}</text>',
        f'<text class="soft" x="{_MARGIN}" y="57">{escape(subtitle)}</text>',
        *_histogram(_MARGIN, 100, half, 130, "Time to first token, ms", firsts, _COLOURS["ttft"]),
        *_histogram(_MARGIN + half + _GAP, 100, half, 130, "Time between tokens, ms", gaps, _COLOURS["itl"]),
        *_timeline(_MARGIN, 312, _WIDTH - 2 * _MARGIN, 140, measured),
    ]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" '
            f'height="{_HEIGHT}" role="img">',
            f"<title>{escape(title)}</title>",
            f"<style>{_STYLE}</style>",
            f'<rect class="back" width="{_WIDTH}" height="{_HEIGHT}" rx="8"/>',
            *body,
            "</svg>\n",
        ]
    )


def _histogram(
    x: float, y: float, width: float, height: float, name: str, values: list[float], colour: str
) -> list[str]:
    """Counts up to a little above p99, so that a few outliers do not squeeze the rest; those are counted in words."""
    parts = [f'<text class="head" x="{x:.1f}" y="{y - 12:.1f}">{escape(name)}</text>']
    parts.append(_line("line", x, y + height, x + width, y + height))
    if not values:
        return [*parts, f'<text class="soft" x="{x:.1f}" y="{y + height / 2:.1f}">nothing was measured</text>']
    p50, p99 = (float(value) for value in np.percentile(values, (50, 99)))
    end = max(p99 * 1.1, 1e-6)
    counts, _ = np.histogram([value for value in values if value <= end], bins=_BINS, range=(0, end))
    bar = width / _BINS
    for at, count in enumerate(counts):
        if count:
            # A bin that holds anything can be seen.
            tall = max(_TALLEST * height * int(count) / int(counts.max()), 1.0)
            parts.append(_box(x + at * bar, y + height - tall, bar - 1, tall, colour))
    for label, value, down in (("p50", p50, 0), ("p99", p99, 14)):
        mark = x + width * value / end
        side, anchor = (4, "start") if value < end / 2 else (-4, "end")
        parts += [
            _line("mark", mark, y + down - 2, mark, y + height, dashed=True),
            f'<text class="soft" x="{mark + side:.1f}" y="{y + down + 8:.1f}" text-anchor="{anchor}">'
            f"{label} {value:.4g}</text>",
        ]
    parts += _ticks(x, y + height, width, end)
    beyond = sum(value > end for value in values)
    if beyond:
        parts.append(
            f'<text class="soft" x="{x + width:.1f}" y="{y - 12:.1f}" text-anchor="end">'
            f"{beyond} beyond, up to {max(values):.4g}</text>"
        )
    return parts


def _timeline(x: float, y: float, width: float, height: float, measured: Measured) -> list[str]:
    """Output tokens a second as bars, requests under way as a line."""
    seconds = max(measured.ended - measured.begun, 1e-3)
    step = max(round_up(seconds / 120), 0.05)
    bins = max(1, int(np.ceil(seconds / step)))
    edges = measured.begun + step * np.arange(bins + 1)
    tokens = _token_counts(measured.records, edges) / step
    middles = (edges[:-1] + edges[1:]) / 2
    under_way = np.array([sum(r.sent <= at < r.end for r in measured.records) for at in middles])
    span, most, crowd = bins * step, float(tokens.max()), int(under_way.max())
    parts = [
        f'<text class="head" x="{x}" y="{y - 12}">Over time, seconds</text>',
        _box(x + 190, y - 22, 12, 10, _COLOURS["tokens"]),
        f'<text x="{x + 208}" y="{y - 12}">output tokens a second, at most {most:,.4g}</text>',
        f'<line x1="{x + 480}" x2="{x + 500}" y1="{y - 17}" y2="{y - 17}" stroke="{_COLOURS["open"]}" '
        'stroke-width="2.5"/>',
        f'<text x="{x + 508}" y="{y - 12}">requests under way, at most {crowd:,}</text>',
        _line("line", x, y + height, x + width, y + height),
    ]
    bar = width / bins
    for at, rate in enumerate(tokens):
        if rate:
            tall = height * float(rate) / most
            parts.append(_box(x + at * bar, y + height - tall, max(bar - 1, 0.5), tall, _COLOURS["tokens"]))
    if crowd:
        points = " ".join(
            f"{x + (at + 0.5) * bar:.1f},{y + height - height * count / crowd:.1f}"
            for at, count in enumerate(under_way)
        )
        parts.append(f'<polyline points="{points}" fill="none" stroke="{_COLOURS["open"]}" stroke-width="2"/>')
    return [*parts, *_ticks(x, y + height, width, span)]


def _token_counts(records: list[Record], edges: Any) -> Any:
    """Tokens in each bin. An event may hold several: an answer's tokens are spread evenly over its events."""
    total = np.zeros(len(edges) - 1)
    for record in records:
        if record.events and record.output_tokens:
            counts, _ = np.histogram(record.events, bins=edges)
            total += counts * (record.output_tokens / len(record.events))
    return total


def round_up(value: float) -> float:
    """The next number of 1, 2, 5 times a power of ten."""
    power = 10.0 ** floor(log10(value))
    return next((factor * power for factor in (1, 2, 5) if value <= factor * power), 10 * power)


def _ticks(x: float, y: float, width: float, end: float) -> list[str]:
    step = round_up(end / 6)
    return [
        f'<text class="soft" x="{x + width * count * step / end:.1f}" y="{y + 18:.1f}" text-anchor="middle">'
        f"{count * step:.4g}</text>"
        for count in range(floor(end / step + 1e-9) + 1)
    ]


def _box(x: float, y: float, width: float, height: float, colour: str) -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{colour}"/>'


def _line(kind: str, x1: float, y1: float, x2: float, y2: float, dashed: bool = False) -> str:
    dashes = ' stroke-dasharray="4 3"' if dashed else ""
    return f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"{dashes}/>'
