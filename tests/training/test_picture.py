"""The picture of a plan, read back."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from phalanx.training.picture import binary_size, svg
from phalanx.training.plan import plan_settings, plan_training
from tests.parallel.real_sizes import hollow


def test_bars_are_as_long_as_what_they_stand_for() -> None:
    found = plan_training(hollow("falcon-7b"), plan_settings(tp_size=8), verify="off")
    text = svg(found, "falcon <7b>")
    root = ElementTree.fromstring(text)
    space = "{http://www.w3.org/2000/svg}"
    bars: dict[str, list[tuple[float, float, str]]] = {}
    for box in root.findall(f"{space}rect"):
        if box.get("height") == "26":
            at = (float(box.attrib["x"]), float(box.attrib["width"]), box.attrib["fill"])
            bars.setdefault(box.attrib["y"], []).append(at)
    assert len(bars) == 8
    lengths = [sum(width for _, width, _ in row) for row in bars.values()]
    held = [found.model.held(rank) for rank in range(8)]
    assert [length / lengths[0] for length in lengths] == pytest.approx([each / held[0] for each in held], abs=1e-4)
    for row in bars.values():
        assert [x for x, *_ in row[1:]] == pytest.approx([x + width for x, width, _ in row[:-1]], abs=0.02)
        copied = sum(width for _, width, fill in row if fill == "url(#copied-attention)")
        assert copied / lengths[0] == pytest.approx(32 * 128 * 4544 / held[0], abs=1e-4)
    known = {each.get("id") for each in root.iter(f"{space}pattern")}
    assert set(re.findall(r"url\(#([^)]+)\)", text)) <= known
    texts = [each.text for each in root.iter(f"{space}text")]
    assert "falcon <7b>: weights of each rank in bfloat16" in texts and binary_size(2 * held[0]) in texts
    width, height = (float(root.attrib[name]) for name in ("width", "height"))
    assert all(
        0 < float(t.attrib["x"]) < width and 0 < float(t.attrib["y"]) < height for t in root.iter(f"{space}text")
    )


def test_many_ranks_and_one() -> None:
    for tp in (1, 32):
        found = plan_training(hollow("llama-3.1-70b"), plan_settings(tp_size=tp), verify="off")
        root = ElementTree.fromstring(svg(found, "llama"))
        labels = [each.text for each in root.iter("{http://www.w3.org/2000/svg}text")]
        assert f"rank {tp - 1}" in labels and float(root.attrib["height"]) < 700
        assert ("hatched: on other ranks too" in labels) == (tp > 1)
