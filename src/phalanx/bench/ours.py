"""Phalanx as a contender."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from phalanx.bench.samples import LocalContender
from phalanx.bench.workload import Workload
from phalanx.engine import LLM, SamplingParams


class Phalanx(LocalContender):
    """An LLM; what is timed is what a user of ``generate`` and ``stream`` gets, text included.

    Args:
        llm: closed with this object.
    """

    engine = "phalanx"

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        config = llm.config
        self.mode = f"tp {config.tensor_parallel_size}"
        self.alone = config.tensor_parallel_size == 1

    @property
    def settings(self) -> dict[str, Any]:
        """The engine's settings that were not left to their defaults."""
        return self.llm.config.model_dump(exclude_unset=True)

    def answer(self, workload: Workload) -> list[list[int]]:
        each = [SamplingParams(max_tokens=length, ignore_eos=True) for length in workload.output_lens]
        return [output.outputs[0].token_ids for output in self.llm.generate(workload.prompts, each)]

    def stream(self, prompt: list[int], length: int, on_token: Callable[[int], None]) -> None:
        for chunk in self.llm.stream(prompt, max_tokens=length, ignore_eos=True):
            for token in chunk.token_ids:
                on_token(token)

    def close(self) -> None:
        self.llm.close()
