"""What an engine tells of itself while it runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from phalanx.engine.core import EngineCore


class EngineStatistics(msgspec.Struct, frozen=True, array_like=True):
    """One moment of a scheduled engine.

    Attributes:
        running, waiting: requests that have a place in the steps, and that wait for one; each of ``n`` answers counts.
        free_blocks, total_blocks: KV blocks that can be handed out (those that are merely cached included), and all but
            the dummy.
        prefix_queries, prefix_hits: prompt tokens that were looked up in the prefix cache so far, and found there.
        preemptions: requests that gave their blocks back so far, to be computed anew.
        generated_tokens: tokens drawn so far.
        steps: steps launched so far.
    """

    running: int
    waiting: int
    free_blocks: int
    total_blocks: int
    prefix_queries: int
    prefix_hits: int
    preemptions: int
    generated_tokens: int
    steps: int

    @classmethod
    def of(cls, core: EngineCore) -> EngineStatistics:
        """How it stands with an engine now."""
        scheduler, pool = core.scheduler, core.kv.pool
        return cls(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            free_blocks=pool.num_free,
            total_blocks=pool.num_blocks - 1,
            prefix_queries=scheduler.prefix_queries,
            prefix_hits=scheduler.prefix_hits,
            preemptions=scheduler.num_preemptions,
            generated_tokens=core.generated_tokens,
            steps=core.steps,
        )

    @property
    def kv_usage(self) -> float:
        """Share of the KV blocks that requests hold, 0 to 1."""
        return 1.0 - self.free_blocks / self.total_blocks if self.total_blocks else 0.0

    def ended(self) -> EngineStatistics:
        """What is left of an engine that has ended: what it has counted."""
        return msgspec.structs.replace(self, running=0, waiting=0, free_blocks=0, total_blocks=0)


def total(several: Sequence[EngineStatistics]) -> EngineStatistics:
    """Those of several engines as if they were one."""
    columns = zip(*map(msgspec.structs.astuple, several), strict=True)
    return EngineStatistics(*map(sum, columns))
