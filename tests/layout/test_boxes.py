"""Boxes: every element of what they stand for, once."""

from __future__ import annotations

from math import prod

import torch
from hypothesis import given
from hypothesis import strategies as st

from phalanx.layout.boxes import Box, flat_boxes, whole, without


@given(st.lists(st.integers(1, 5), min_size=0, max_size=3), st.data())
def test_a_run_of_elements_is_a_few_boxes(shape: list[int], data: st.DataObject) -> None:
    total = prod(shape)
    start = data.draw(st.integers(0, total))
    stop = data.draw(st.integers(start, total))
    numbers = torch.arange(total).view(shape)
    found = list(flat_boxes(shape, start, stop))
    assert [int(n) for box, _ in found for n in numbers[box].reshape(-1)] == list(range(start, stop))
    assert [first for _, first in found] == [int(numbers[box].reshape(-1)[0]) for box, _ in found]
    assert len(found) <= max(1, 2 * len(shape) - 1)


@given(st.lists(st.integers(1, 5), min_size=1, max_size=3), st.data())
def test_what_is_left_of_a_box(shape: list[int], data: st.DataObject) -> None:
    def drawn(within: Box) -> Box:
        sides = []
        for side in within:
            first = data.draw(st.integers(side.start, side.stop - 1))
            sides.append(slice(first, data.draw(st.integers(first + 1, side.stop))))
        return tuple(sides)

    box = drawn(whole(shape))
    hole = drawn(box)
    count = torch.zeros(shape, dtype=torch.int64)
    for part in [*without(box, hole), hole]:
        count[part] += 1
    expected = torch.zeros(shape, dtype=torch.int64)
    expected[box] = 1
    assert torch.equal(count, expected)
