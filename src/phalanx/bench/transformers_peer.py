"""transformers as a contender, in each of its ways to answer many prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from phalanx.bench.samples import LocalContender, Sample
from phalanx.bench.workload import Plan, Workload

BATCH = 8
"""Prompts of a padded batch."""


class Transformers(LocalContender):
    """``AutoModelForCausalLM`` with SDPA attention.

    Args:
        model: a Hugging Face folder, or the model itself.
        mode: "padded" (left-padded batches in the order of the prompts), "continuous" (its continuous batching) or
            "single" (one prompt after the other).
    """

    engine = "transformers"

    def __init__(
        self, model: Path | torch.nn.Module, mode: str, dtype: torch.dtype, device: torch.device, threads: int | None
    ) -> None:
        from transformers import AutoModelForCausalLM

        self.mode = mode
        if threads is not None:
            torch.set_num_threads(threads)
        load: Any = AutoModelForCausalLM.from_pretrained
        with _no_bars():
            opened = load(model, dtype=dtype, attn_implementation="sdpa") if isinstance(model, Path) else model
        self.model: Any = opened.to(device).eval()
        self.device = device
        self._held = ExitStack()
        self._manager: Any = None
        self._plan: Plan | None = None

    def measure(self, plan: Plan) -> list[Sample]:
        self._plan = plan
        return super().measure(plan)

    def answer(self, workload: Workload) -> list[list[int]]:
        if self.mode == "continuous":
            return self._continuous(workload)
        size = BATCH if self.mode == "padded" else 1
        answers: list[list[int]] = []
        for first in range(0, len(workload.prompts), size):
            these = slice(first, first + size)
            answers += self._padded(workload.prompts[these], workload.output_lens[these])
        return answers

    def stream(self, prompt: list[int], length: int, on_token: Callable[[int], None]) -> None:
        self._generate([prompt], length, _Streamer(on_token))

    def close(self) -> None:
        self._held.close()
        self.model = None

    def _padded(self, prompts: list[list[int]], lengths: list[int]) -> list[list[int]]:
        """A batch runs until its longest answer is there; the others' surplus is cut off."""
        rows = self._generate(prompts, max(lengths), None)
        return [row[:length] for row, length in zip(rows, lengths, strict=True)]

    def _generate(self, prompts: list[list[int]], length: int, streamer: Any) -> list[list[int]]:
        width = max(map(len, prompts))
        ids = torch.zeros(len(prompts), width, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, width - len(prompt) :] = torch.tensor(prompt)
            mask[row, width - len(prompt) :] = 1
        out = self.model.generate(
            ids.to(self.device),
            attention_mask=mask.to(self.device),
            generation_config=_greedy(length),
            streamer=streamer,
        )
        return [row[width:].tolist() for row in out]

    def _opened_manager(self) -> Any:
        """The manager of warm-up and measurements, as a server would keep it."""
        from transformers import ContinuousBatchingConfig

        config = ContinuousBatchingConfig(allow_block_sharing=False)
        if self.device.type == "cpu" and self._plan is not None:
            # Left alone it fills most of the machine's memory. This is all that the workload can use.
            page: int = getattr(config, "page_size", None) or config.block_size or 256
            work = self._plan.workload
            lengths = [len(prompt) + out for prompt, out in zip(work.prompts, work.output_lens, strict=True)]
            config.num_blocks = sum(-(-length // page) + 1 for length in lengths)
        return self.model.continuous_batching_context_manager(
            generation_config=_greedy(None, no_end=-1), continuous_batching_config=config
        )

    def _continuous(self, workload: Workload) -> list[list[int]]:
        if self._manager is None:
            self._manager = self._held.enter_context(self._opened_manager())
        names = [
            self._manager.add_request(prompt, max_new_tokens=length, eos_token_id=-1)
            for prompt, length in zip(workload.prompts, workload.output_lens, strict=True)
        ]
        answers: dict[str, list[int]] = {}
        while len(answers) < len(names):
            result = self._manager.get_result(timeout=1)
            if result is not None and result.is_finished():
                answers[result.request_id] = list(result.generated_tokens)
            elif result is None and not self._manager.is_running():
                raise RuntimeError("transformers' continuous batching ended by itself")
        return [answers[name] for name in names]


class _Streamer:
    """What ``generate`` puts tokens into; the first thing it puts is the prompt."""

    def __init__(self, on_token: Callable[[int], None]) -> None:
        self._on_token = on_token
        self._begun = False

    def put(self, value: torch.Tensor) -> None:
        if self._begun:
            for token in value.flatten().tolist():
                self._on_token(token)
        self._begun = True

    def end(self) -> None: ...


@contextmanager
def _no_bars() -> Iterator[None]:
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _greedy(length: int | None, no_end: int | None = None) -> Any:
    """``no_end`` is how the end token is said that there is none; continuous batching warns of None."""
    from transformers import GenerationConfig

    return GenerationConfig(do_sample=False, max_new_tokens=length, eos_token_id=no_end, pad_token_id=0)
