"""Rows in which every pair of values of any two factors occurs."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Row = dict[str, Any]


def pairwise(factors: Mapping[str, Sequence[Any]], possible: Callable[[Row], bool] = lambda row: True) -> list[Row]:
    """A greedy covering array: few rows, each possible, that hold every pair that some possible row holds.

    `possible` judges partial rows as well: of factors that are not there yet it says nothing.
    """
    names = list(factors)
    draw = random.Random(0)
    uncovered = {
        ((a, i), (b, j))
        for a, b in itertools.combinations(names, 2)
        for i in range(len(factors[a]))
        for j in range(len(factors[b]))
        if possible({a: factors[a][i], b: factors[b][j]})
    }
    rows: list[Row] = []
    while uncovered:
        best: dict[str, int] = {}
        best_count = 0
        for _ in range(40):
            (a, i), (b, j) = draw.choice(sorted(uncovered))
            chosen = {a: i, b: j}
            for name in draw.sample([n for n in names if n not in chosen], len(names) - 2):
                options = [
                    k
                    for k in range(len(factors[name]))
                    if possible({n: factors[n][v] for n, v in {**chosen, name: k}.items()})
                ]
                if not options:
                    break
                chosen[name] = max(options, key=lambda k: (_new(uncovered, names, {**chosen, name: k}), draw.random()))
            if len(chosen) == len(names) and (count := _new(uncovered, names, chosen)) > best_count:
                best, best_count = chosen, count
        if not best:
            break
        uncovered -= set(_pairs(names, best))
        rows.append({name: factors[name][best[name]] for name in names})
    return rows


def _pairs(names: Sequence[str], chosen: Mapping[str, int]) -> list[tuple[tuple[str, int], tuple[str, int]]]:
    present = [name for name in names if name in chosen]
    return [((a, chosen[a]), (b, chosen[b])) for a, b in itertools.combinations(present, 2)]


def _new(uncovered: set[Any], names: Sequence[str], chosen: Mapping[str, int]) -> int:
    return sum(pair in uncovered for pair in _pairs(names, chosen))
