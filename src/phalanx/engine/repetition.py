"""Repetition: steps in which all running requests add a token, as in the step before, without asking each of them.

Most steps of a busy engine are such. What a step of its own would find out of every request is known: the same rows, a
token further. Only blocks that begin now are new, and arithmetic over all positions at once finds them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from phalanx.engine.kv_manager import KVManager
from phalanx.engine.scheduler import Scheduler
from phalanx.engine.sequence import Request
from phalanx.engine.step import Blocks, Row, only_decodes


class Repetition:
    """What the last launched step leaves to go on with.

    Args:
        scheduler: whose changes end a repetition.
        kv: gives blocks.
    """

    def __init__(self, scheduler: Scheduler, kv: KVManager) -> None:
        self._scheduler = scheduler
        self._kv = kv
        self._requests: list[Request] = []
        self._computed = np.empty(0, np.int64)
        self._left = 0
        self._changes = -1

    def begin(self, requests: list[Request], rows: Sequence[Row], masked: bool) -> None:
        """A step of these rows was launched; its requests are counted up already."""
        self._left = 0
        running = self._scheduler.running
        if masked or not self._kv.plain or len(requests) != len(running):
            return
        if only_decodes(rows):
            self._requests = requests
            self._computed = np.fromiter((request.num_computed for request in requests), np.int64, len(requests))
            self._left = min(request.max_tokens - request.num_tokens + request.prompt_len for request in requests)
            self._changes = self._scheduler.changes

    def go_on(self) -> tuple[list[Request], list[Blocks]] | None:
        """The requests of the next step and the blocks that they begin, if it repeats the last one; else None, and
        the scheduler has to be asked."""
        if not self._left or self._changes != self._scheduler.changes or self._scheduler.can_admit:
            return None
        begun = np.flatnonzero(self._computed % self._kv.block_size == 0).tolist()
        if not all(self._kv.allocate(self._requests[index], 1) for index in begun):
            return None
        blocks = []
        for index in begun:
            request = self._requests[index]
            sent, held = request.sent_blocks, len(request.blocks[0])
            if held > sent:
                request.sent_blocks = held
                blocks.append(Blocks(index, sent, [group[sent:] for group in request.blocks]))
        self._computed += 1
        self._left -= 1
        return self._requests, blocks
