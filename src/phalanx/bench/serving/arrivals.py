"""When requests are sent, where their times do not depend on the answers (an open loop)."""

from __future__ import annotations

import random
from collections.abc import Iterator


def arrivals(rate: float, burstiness: float, seed: int) -> Iterator[float]:
    """Seconds from the start at which requests are sent, without end; the first is sent at once.

    Args:
        rate: requests a second on average.
        burstiness: the shape of the gamma distribution that gaps are drawn from. 1 is a Poisson process; below 1,
            requests come in bursts; above 1, more and more evenly.

    Raises:
        ValueError: a rate or burstiness that is not above 0.
    """
    if not (rate > 0 and burstiness > 0):
        raise ValueError(f"a rate ({rate}) and a burstiness ({burstiness}) above 0 are expected")
    return _arrivals(rate, burstiness, random.Random(seed))


def _arrivals(rate: float, burstiness: float, chance: random.Random) -> Iterator[float]:
    at = 0.0
    while True:
        yield at
        at += chance.gammavariate(burstiness, 1 / (rate * burstiness))
