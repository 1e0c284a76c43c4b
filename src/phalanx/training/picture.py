"""A plan as a picture: for each rank a bar of the bytes of its weights, by the parts of the model."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from math import floor, log10

from phalanx.parallel.plan import PARTS, Part
from phalanx.training.plan import TrainingPlan

_WIDTH, _MARGIN = 960, 24
_LEFT, _RIGHT = 84, 92  # for the names of ranks and for what a bar adds up to
_TITLE, _LEGEND, _AXIS = 62, 34, 40
_UNITS = ("B", "KiB", "MiB", "GiB")
_TEXT_WIDTH = 6.6  # of a letter of 12 px, on average
_COLOURS: dict[Part, str] = {
    "attention": "#3b6fb6",
    "MLP": "#c05f25",
    "experts": "#8458b3",
    "embedding": "#2b8a66",
    "norms": "#b23a62",
    "other": "#6f7680",
}
_NAMES: dict[Part, str] = {"embedding": "embedding and head", "norms": "norms"}
_STYLE = """
  text { font: 12px system-ui, -apple-system, "Segoe UI", "DejaVu Sans", Helvetica, Arial, sans-serif; fill: #1f2328; }
  .title { font-size: 17px; font-weight: 600; }
  .soft { fill: #59636e; }
  .in { fill: #ffffff; font-size: 11px; }
  .back { fill: #ffffff; }
  .line { stroke: #d1d9e0; stroke-width: 1; }
  @media (prefers-color-scheme: dark) {
    text { fill: #f0f6fc; }
    .soft { fill: #9198a1; }
    .in { fill: #ffffff; }
    .back { fill: #0d1117; }
    .line { stroke: #3d444d; }
  }
"""


def svg(plan: TrainingPlan, title: str) -> str:
    """An SVG document, for light and dark pages. Hatched: what other ranks hold as well."""
    ranks = range(plan.model.tp_size)
    # Many ranks get thinner bars, so that a picture still fits a page.
    bar, gap = (26, 10) if len(ranks) <= 16 else (12, 4)
    top = _MARGIN + _TITLE + _LEGEND
    bottom = top + len(ranks) * (bar + gap)
    rows = [list(_segments(plan, rank)) for rank in ranks]
    largest = max(sum(size for *_, size in row) for row in rows)
    room = _WIDTH - 2 * _MARGIN - _LEFT - _RIGHT
    left = _MARGIN + _LEFT
    body = [*_head(plan, title), *_legend(rows, _MARGIN + _TITLE + 12)]
    for value, label in _ticks(largest):
        x = left + room * value / largest
        body += [
            f'<line class="line" x1="{x:.1f}" x2="{x:.1f}" y1="{top - 4}" y2="{bottom}"/>',
            _text(x, bottom + 18, label, "soft", "middle"),
        ]
    for rank, row in enumerate(rows):
        y, x = top + rank * (bar + gap), float(left)
        middle = y + bar / 2 + 4
        body.append(_text(left - 10, middle, f"rank {rank}", anchor="end"))
        for part, hatched, size in row:
            width = room * size / largest
            body += _box(x, y, width, bar, part, hatched)
            if not hatched and bar > 20:
                body += _inside(x, middle, width, part, size)
            x += width
        body.append(_text(x + 8, middle, binary_size(sum(size for *_, size in row)), "soft"))
    height = bottom + _AXIS
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" '
            f'height="{height}" role="img">',
            f"<title>{escape(title)}</title>",
            f"<style>{_STYLE}</style>",
            f"<defs>{''.join(_hatch(part) for part in PARTS)}</defs>",
            f'<rect class="back" width="{_WIDTH}" height="{height}" rx="8"/>',
            *body,
            "</svg>\n",
        ]
    )


def binary_size(number: float) -> str:
    """Bytes for people: 3 digits, and two decimals of a GiB."""
    for unit in _UNITS[:-1]:
        if number < 1000:
            return f"{number:.3g} {unit}"
        number /= 1024
    return f"{number:.2f} {_UNITS[-1]}"


def _segments(plan: TrainingPlan, rank: int) -> Iterator[tuple[Part, bool, int]]:
    """(part, whether other ranks hold it too, bytes) of one rank's weights, in the order of the legend."""
    width = plan.dtype.itemsize
    for part in PARTS:
        groups = [group for group in plan.model.groups if group.part == part]
        shared = sum(group.held_elsewhere_too(rank) for group in groups) if plan.model.tp_size > 1 else 0
        for hatched, elements in ((False, sum(group.held(rank) for group in groups) - shared), (True, shared)):
            if elements:
                yield part, hatched, elements * width


def _head(plan: TrainingPlan, title: str) -> list[str]:
    model = plan.model
    told = f"{model.parameters / 1e9:.3g} billion parameters"
    if model.tp_size > 1:
        told += f" over {model.tp_size} ranks; {percent(model.copied_share)} of what they hold are copies"
    dtype = str(plan.dtype).removeprefix("torch.")
    return [
        _text(_MARGIN, _MARGIN + 16, f"{title}: weights of each rank in {dtype}", "title"),
        _text(_MARGIN, _MARGIN + 40, told, "soft"),
    ]


def percent(share: float) -> str:
    """A share for people, in two digits."""
    return "none" if share == 0 else f"{100 * share:.2g} %"


def _legend(rows: list[list[tuple[Part, bool, int]]], y: float) -> Iterator[str]:
    x = float(_MARGIN)
    for part in PARTS:
        if any(part == each for row in rows for each, *_ in row):
            yield from _box(x, y - 10, 14, 12, part, False)
            name = _NAMES.get(part, part)
            yield _text(x + 20, y, name)
            x += 48 + len(name) * _TEXT_WIDTH
    if any(hatched for row in rows for _, hatched, _ in row):
        yield from _box(x, y - 10, 14, 12, "other", True)
        yield _text(x + 20, y, "hatched: on other ranks too")


def _box(x: float, y: float, width: float, height: float, part: Part, hatched: bool) -> list[str]:
    fill = f"url(#copied-{part})" if hatched else _COLOURS[part]
    return [f'<rect x="{x:.2f}" y="{y:.1f}" width="{width:.2f}" height="{height}" fill="{fill}"/>']


def _hatch(part: Part) -> str:
    colour = _COLOURS[part]
    return (
        f'<pattern id="copied-{part}" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
        f'<rect width="6" height="6" fill="{colour}" fill-opacity="0.3"/>'
        f'<rect width="2.5" height="6" fill="{colour}"/></pattern>'
    )


def _inside(x: float, y: float, width: float, part: Part, size: int) -> list[str]:
    """What a part takes, written into it where there is room, with its name where there is more."""
    short = binary_size(size)
    for text in (f"{_NAMES.get(part, part)}  {short}", short):
        if width > len(text) * _TEXT_WIDTH + 10:
            return [_text(x + width / 2, y, text, "in", "middle")]
    return []


def _text(x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> str:
    named = f' class="{kind}"' if kind else ""
    return f'<text{named} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _ticks(largest: int) -> list[tuple[float, str]]:
    """Round numbers of bytes from 0 up to `largest`, at most eight, all in one unit."""
    number = float(largest)
    names = iter(_UNITS)
    unit = next(names)
    while number >= 1000 and unit != _UNITS[-1]:
        number, unit = number / 1024, next(names)
    power = 10.0 ** floor(log10(number))
    step = next(factor * power for factor in (0.2, 0.5, 1, 2) if number <= 7 * factor * power)
    return [
        (largest * (count * step / number), f"{count * step:g} {unit}" if count else "0")
        for count in range(int(number / step) + 1)
    ]
