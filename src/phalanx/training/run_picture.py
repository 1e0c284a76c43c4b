"""The curves of training runs, read from their logs and drawn as SVG."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from math import isfinite
from pathlib import Path
from typing import Any

_WIDTH, _HEIGHT, _MARGIN, _LEFT, _DOWN = 960, 620, 24, 56, 28
_COLOURS = ("#3b6fb6", "#c05f25", "#2b8a66", "#8458b3", "#b03a5b", "#6b7280")
_CHARTS = (
    ("loss", ("loss", "validation_loss")),
    ("learning rate", ("learning_rate",)),
    ("gradient norm", ("grad_norm",)),
    ("tokens per second", ("tokens_per_second",)),
)
_STYLE = """
  text { font: 12px system-ui, -apple-system, "Segoe UI", "DejaVu Sans", Helvetica, Arial, sans-serif; fill: #1f2328; }
  .head { font-size: 13px; font-weight: 600; } .soft { fill: #59636e; } .back { fill: #ffffff; }
  .line { stroke: #d1d9e0; fill: none; } .curve { fill: none; stroke-width: 1.6; }
  @media (prefers-color-scheme: dark) {
    text { fill: #f0f6fc; } .soft { fill: #9198a1; } .back { fill: #0d1117; } .line { stroke: #3d444d; }
  }
"""

Log = Sequence[Mapping[str, Any]]


def read_log(path: Path) -> list[dict[str, Any]]:
    """The lines of a run's `log.jsonl`.

    Raises:
        ValueError: a line that is none, named by its number; no lines at all. A last line without its end, of a run
            that goes on or was killed, is left out.
    """
    lines = []
    text = path.read_text(encoding="utf-8", errors="replace")
    for number, line in enumerate(text[: text.rfind("\n") + 1].splitlines(), 1):
        try:
            value = json.loads(line)
            lines.append({**value, "step": int(value["step"])})
        except (ValueError, TypeError, KeyError):
            raise ValueError(f"{path}, line {number} is no line of a training log: {line[:80]!r}") from None
    if not lines:
        raise ValueError(f"{path} has no lines: nothing was logged yet")
    return lines


def svg(runs: Mapping[str, Log]) -> str:
    """An SVG document with a chart a figure, a colour a run, for light and dark pages."""
    half, tall = (_WIDTH - 3 * _MARGIN) / 2, (_HEIGHT - 3 * _MARGIN - 24) / 2
    body = []
    for number, (title, names) in enumerate(_CHARTS):
        x = _MARGIN + (number % 2) * (half + _MARGIN)
        y = _MARGIN + (number // 2) * (tall + _MARGIN)
        body += _chart(x, y, half, tall, title, names, list(runs.values()))
    x = float(_MARGIN)
    for number, name in enumerate(runs):
        colour = _COLOURS[number % len(_COLOURS)]
        body.append(f'<rect x="{x:.0f}" y="{_HEIGHT - 26}" width="12" height="4" rx="2" fill="{colour}"/>')
        body.append(f'<text class="soft" x="{x + 18:.0f}" y="{_HEIGHT - 20}">{escape(name)}</text>')
        x += 36 + 7 * len(name)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" '
            f'height="{_HEIGHT}" role="img">',
            "<title>Training run</title>",
            f"<style>{_STYLE}</style>",
            f'<rect class="back" width="{_WIDTH}" height="{_HEIGHT}" rx="8"/>',
            *body,
            "</svg>\n",
        ]
    )


def _chart(
    x: float, y: float, width: float, height: float, title: str, names: Sequence[str], runs: Sequence[Log]
) -> list[str]:
    parts = [f'<text class="head" x="{x:.1f}" y="{y + 12:.1f}">{escape(title)}</text>']
    left, top, right, low = x + _LEFT, y + 24, x + width, y + height - _DOWN
    curves = [
        (colour, name, [(line["step"], float(line[name])) for line in log if _number(line.get(name))])
        for colour, log in zip(_COLOURS * (1 + len(runs) // len(_COLOURS)), runs, strict=False)
        for name in names
    ]
    points = [point for _, _, curve in curves for point in curve]
    parts.append(f'<path class="line" d="M{left:.1f} {top:.1f}V{low:.1f}H{right:.1f}"/>')
    if not points:
        return [*parts, f'<text class="soft" x="{left + 8:.1f}" y="{(top + low) / 2:.1f}">not in the log</text>']
    steps, values = [step for step, _ in points], [value for _, value in points]
    first, last = min(steps), max(max(steps), min(steps) + 1)
    least, most = min(values), max(values)
    if most == least:
        least, most = least - abs(least) / 10 - 1e-12, most + abs(most) / 10 + 1e-12

    def place(step: float, value: float) -> tuple[float, float]:
        return (
            left + (right - left) * (step - first) / (last - first),
            low - (low - top) * (value - least) / (most - least),
        )

    for value in (least, (least + most) / 2, most):
        _, at = place(first, value)
        parts.append(f'<text class="soft" x="{left - 6:.1f}" y="{at + 4:.1f}" text-anchor="end">{value:.4g}</text>')
    for step, anchor in ((first, "start"), (last, "end")):
        at, _ = place(step, least)
        parts.append(f'<text class="soft" x="{at:.1f}" y="{low + 16:.1f}" text-anchor="{anchor}">step {step}</text>')
    for colour, name, curve in curves:
        if not curve:
            continue
        path = "L".join("{:.1f} {:.1f}".format(*place(*point)) for point in sorted(curve))
        dash = ' stroke-dasharray="5 3"' if name.startswith("validation") else ""
        if len(curve) == 1:
            cx, cy = place(*curve[0])
            parts.append(f'<circle cx="{cx:.1f}" cy="{cy:.1f}" r="3" fill="{colour}"/>')
        parts.append(f'<path class="curve" stroke="{colour}"{dash} d="M{path}"/>')
    return parts


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and isfinite(value)
