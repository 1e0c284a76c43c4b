"""A picture of measured runs beside the GPU's limits, from the JSON of `engine.py`.

    python benchmarks/serving/picture.py benchmarks/results/serving-*.json --output serving.svg

A bar is what a point reaches of its roofline: the time that reading weights and cache, and the products, take at least
at the rates measured in the same run, over the time that it took.
"""

from __future__ import annotations

import argparse
import json
from html import escape
from pathlib import Path
from typing import Any

ROW, BAR, RIGHT = 24, 420, 190
# Of a letter of a label, on average.
LETTER = 6.6


def rows_of(path: Path) -> list[tuple[str, float, float]]:
    """(label, share of the roofline, tokens a second) of each point in a report that has both."""
    report: dict[str, Any] = json.loads(path.read_text())
    settings = ", ".join(f"{name} {value}" for name, value in report["settings"].items() if value not in (1, None))
    model = report["shape"] + (f" ({settings})" if settings else "")
    return [
        (f"{model}: {point['what']}", point["of_roofline"], point["tokens_per_second"])
        for point in report["results"]
        if "of_roofline" in point
    ]


def draw(rows: list[tuple[str, float, float]]) -> str:
    """The rows as SVG, one bar each, with a line at the roofline. Points above it count weights as bytes of less."""
    left = 16 + round(LETTER * max(len(label) for label, _, _ in rows))
    height, width = ROW * (len(rows) + 2), left + BAR + RIGHT
    # The farthest point fits, and so does the roofline itself.
    scale = BAR / max(1.0, *(share for _, share, _ in rows))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        'font-size="12" role="img" aria-label="Throughput as a share of the roofline">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
    ]
    for index, (label, share, rate) in enumerate(rows):
        y = ROW * (index + 1)
        parts += [
            f'<text x="{left - 8}" y="{y + 13}" text-anchor="end" fill="#222222">{escape(label)}</text>',
            f'<rect x="{left}" y="{y}" width="{share * scale:.1f}" height="{ROW - 7}" fill="#2f6f9f"/>',
            f'<text x="{left + share * scale + 6:.1f}" y="{y + 13}" fill="#222222">'
            f"{share:.0%}, {rate:,.0f} tok/s</text>",
        ]
    x = left + scale
    parts += [
        f'<line x1="{x:.1f}" y1="{ROW // 2}" x2="{x:.1f}" y2="{height - ROW}" stroke="#c0392b" '
        'stroke-dasharray="4 3"/>',
        f'<text x="{x:.1f}" y="{height - 8}" text-anchor="middle" fill="#c0392b">roofline</text>',
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("reports", type=Path, nargs="+")
    parser.add_argument("--output", type=Path, required=True, help="where the SVG goes")
    given = parser.parse_args()
    rows = [row for path in given.reports for row in rows_of(path)]
    if not rows:
        raise SystemExit("no report holds a point with a roofline")
    given.output.write_text(draw(rows))


if __name__ == "__main__":
    main()
