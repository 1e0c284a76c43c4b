"""The engine under random use: requests come, steps run, some are aborted; the design's invariants hold after each."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from phalanx import LLM, Guide
from phalanx.engine.block_pool import DUMMY_BLOCK
from phalanx.engine.request_group import RequestGroup
from phalanx.engine.sequence import Status

FOLDER: list[Path] = []
NUM_BLOCKS, BLOCK = 14, 4

PROMPTS = st.one_of(
    st.lists(st.integers(3, 200), min_size=1, max_size=20),
    # Much in common, so that blocks are shared.
    st.integers(0, 19).map(lambda n: list(range(40, 60))[: n + 1]),
)


@pytest.fixture(scope="module", autouse=True)
def _folder(tiny_folder: Path) -> None:
    FOLDER[:] = [tiny_folder]


@cache
def answer_alone(prompt: tuple[int, ...], max_tokens: int, seed: int | None, guide: Guide | None) -> list[int]:
    """The request alone in a roomy engine; that engine is compared with transformers elsewhere."""
    params: dict[str, Any] = {} if seed is None else {"temperature": 1.0, "seed": seed, "top_p": 0.9}
    output = roomy().generate([list(prompt)], max_tokens=max_tokens, guide=guide, **params)[0]
    return output.outputs[0].token_ids


@cache
def roomy() -> LLM:
    return LLM(FOLDER[0], num_blocks=200, block_size=BLOCK, prefix_cache=False, dtype="float64")


class Engine(RuleBasedStateMachine):
    @initialize(
        loop=st.sampled_from(["plain", "async"]),
        budget=st.sampled_from([1, 5, 24]),
        prefix_cache=st.booleans(),
        places=st.integers(1, 6),
    )
    def start(self, loop: str, budget: int, prefix_cache: bool, places: int) -> None:
        self.llm = LLM(
            FOLDER[0],
            num_blocks=NUM_BLOCKS,
            block_size=BLOCK,
            loop=loop,
            max_num_batched_tokens=budget,
            max_num_seqs=min(places, budget),
            prefix_cache=prefix_cache,
            # Where kernels depend on the batch, fp32 rounding could move a draw across the border of two tokens.
            dtype="float64",
        )
        self.asked: dict[str, tuple[RequestGroup, tuple[int, ...], int, int | None, Guide | None, bool]] = {}

    @rule(
        prompt=PROMPTS,
        max_tokens=st.integers(1, 12),
        seed=st.one_of(st.none(), st.integers(0, 3)),
        n=st.integers(1, 3),
        guide=st.sampled_from([None, Guide(kind="regex", text="[a-f]{2,9}"), Guide(kind="choice", text=["yes", "no"])]),
    )
    def add(self, prompt: list[int], max_tokens: int, seed: int | None, n: int, guide: Guide | None) -> None:
        params: dict[str, Any] = {"max_tokens": max_tokens, "guide": guide}
        if seed is not None:
            params.update(temperature=1.0, seed=seed, top_p=0.9, n=n)
        name = self.llm.add_request(prompt, params)
        self.asked[name] = (self.llm.group_of(name), tuple(prompt), max_tokens, seed, guide, False)

    @rule(count=st.integers(1, 6))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.llm.step()

    @precondition(lambda self: self.asked)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.asked)))
        group, prompt, max_tokens, seed, guide, _ = self.asked[name]
        self.llm.abort(name)
        self.asked[name] = (group, prompt, max_tokens, seed, guide, True)

    @invariant()
    def books_balance(self) -> None:
        if not hasattr(self, "llm"):
            return
        kv, scheduler = self.llm.core.kv, self.llm.core.scheduler
        kv.check()
        held = [b for r in scheduler.running + scheduler.waiting for bs in r.blocks for b in bs if b != DUMMY_BLOCK]
        leaving = [block for _, blocks in kv._leaving for block in blocks]
        for block in range(1, NUM_BLOCKS):
            assert kv.pool.users(block) == held.count(block) + leaving.count(block)
        for request in scheduler.running:
            assert request.status is Status.RUNNING and request.num_blocks * BLOCK >= request.num_computed
            if kv.cache is not None:
                # Only finished KV is in the index: never a block past what ended steps have written.
                for place, block in enumerate(request.blocks[0]):
                    if (place + 1) * BLOCK > request.num_committed:
                        assert kv.cache.entry_of(block) is None

    def teardown(self) -> None:
        if not hasattr(self, "llm"):
            return
        steps = 0
        while self.llm.has_work:
            self.llm.step()
            steps += 1
            assert steps < 3000, "no progress"
        self.llm.core.check_idle()
        for group, prompt, max_tokens, seed, guide, aborted in self.asked.values():
            for request in group.requests:
                assert request.is_finished
                if request.finish_reason == "abort":
                    assert aborted
                    continue
                own = None if seed is None else seed + request.index
                assert request.tokens[request.prompt_len :] == answer_alone(prompt, max_tokens, own, guide)
        self.llm.close()


Engine.TestCase.settings = settings(max_examples=50, stateful_step_count=20, deadline=None)
TestEngine = Engine.TestCase
