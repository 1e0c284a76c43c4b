"""Scheduler: which requests get how many tokens of the next step.

A step is a budget of tokens. Running answers go first (a token each), then prompts in their order of arrival, in chunks
(Dynamic SplitFuse), until the budget is full: long prompts never stall running answers. Out of blocks, the youngest
request gives its blocks back and is computed anew later; the oldest therefore always gets on.
"""

from __future__ import annotations

import time

from phalanx.engine.kv_manager import KVManager
from phalanx.engine.sequence import Request, Status


class Scheduler:
    """Owns the waiting and the running requests. ``changes`` counts how often what runs has changed.

    Args:
        kv: gives them blocks.
        max_num_seqs: requests that run at once.
        token_budget: tokens of a step.
    """

    def __init__(self, kv: KVManager, max_num_seqs: int, token_budget: int) -> None:
        self.kv = kv
        self.max_num_seqs = max_num_seqs
        self.token_budget = token_budget
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.changes = 0
        self.num_preemptions = 0
        self.prefix_queries = self.prefix_hits = 0
        self._slots = list(range(max_num_seqs - 1, -1, -1))

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    @property
    def can_admit(self) -> bool:
        """Whether a request waits that has a place; it may lack blocks or tokens."""
        return bool(self.waiting) and len(self.running) < self.max_num_seqs

    def add(self, request: Request) -> None:
        """Queues a request by its order of arrival."""
        request.status = Status.WAITING
        position = len(self.waiting)
        while position and self.waiting[position - 1].arrival > request.arrival:
            position -= 1
        self.waiting.insert(position, request)

    def finish(self, request: Request, reason: str) -> None:
        """Ends a request in whatever state it is; its blocks return once no launched step names them."""
        if request in self.running:
            self._leave(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        self.kv.free(request)
        request.slot = -1
        request.status = Status.FINISHED
        request.finish_reason = reason

    def schedule(self, drained: bool) -> dict[Request, int]:
        """Tokens of the next step a request, with their blocks allocated; {} when nothing can run now.

        Args:
            drained: no step is in flight. Only then can blocks be taken from a running request; else a shortage gives
                an empty step, which lets the launched one end.
        """
        step: dict[Request, int] = {}
        budget = self.token_budget
        answers: list[tuple[Request, int]] = []
        prompts: list[tuple[Request, int]] = []
        # Every running request passes here in every step, so nothing is called that can be said as shortly in place.
        for request in self.running:
            pending = request.pending
            known = len(request.tokens) + pending
            if not pending or known - request.prompt_len < request.max_tokens:
                left = known - request.num_computed
                (prompts if left > 1 else answers).append((request, left))
        for request, left in (*answers, *prompts):
            count = left if left < budget else budget
            # A request may have been preempted for one before it.
            if count < 1 or request.slot < 0:
                continue
            if not self.kv.allocate(request, count):
                if not drained:
                    return {}
                budget += self._make_room(request, count, step)
                if request.slot < 0:
                    continue
            step[request] = count
            budget -= count
        self._admit(step, budget)
        return step

    def _make_room(self, request: Request, count: int, step: dict[Request, int]) -> int:
        """Preempts from the youngest on until ``request`` has its blocks, or is preempted itself.

        Returns the tokens of ``step`` that were given up.
        """
        returned = 0
        while not self.kv.allocate(request, count):
            victim = self.running[-1]
            returned += step.pop(victim, 0)
            self._preempt(victim)
            if victim is request:
                break
        return returned

    def _leave(self, request: Request) -> None:
        self.running.remove(request)
        self._slots.append(request.slot)
        self.changes += 1

    def _preempt(self, request: Request) -> None:
        self._leave(request)
        self.kv.free(request)
        request.slot = request.sent_blocks = -1
        request.preemptions += 1
        self.num_preemptions += 1
        self.add(request)

    def _admit(self, step: dict[Request, int], budget: int) -> None:
        """Starts waiting requests while tokens, places and blocks for their whole prompts are left."""
        for request in list(self.waiting):
            if budget < 1 or len(self.running) >= self.max_num_seqs:
                return
            parent = request.parent
            if parent is not None and not parent.is_finished and parent.num_committed < parent.prompt_len:
                continue
            if parent is not None and not parent.is_finished and request.num_computed == 0:
                self.kv.share_prompt(parent, request)
            if request.num_computed == 0 and not request.needs_whole_prompt:
                self.kv.match(request)
            left = request.num_tokens - request.num_computed
            fits, _ = self.kv.model.get_kv_requirements(request, left, self.kv.free_blocks)
            count = min(left, budget)
            if fits < left or not self.kv.allocate(request, count):
                self.kv.free(request)
                return
            if request.preemptions == 0:
                self._count_start(request)
            self.waiting.remove(request)
            self._start(request)
            step[request] = count
            budget -= count

    def _count_start(self, request: Request) -> None:
        request.started_at = time.monotonic()
        request.cached_tokens = request.num_computed
        if self.kv.cache is not None:
            self.prefix_queries += request.num_tokens
            self.prefix_hits += request.cached_tokens

    def _start(self, request: Request) -> None:
        request.slot = self._slots.pop()
        request.status = Status.RUNNING
        self.changes += 1
        position = len(self.running)
        while position and self.running[position - 1].arrival > request.arrival:
            position -= 1
        self.running.insert(position, request)
