"""What is measured: prompts of random tokens, answers of given lengths."""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True)
class Workload:
    """Prompts and how many tokens to answer each with: greedily, whatever the model's end tokens.

    Attributes:
        prompts: token ids.
        output_lens: tokens of each answer.
    """

    prompts: list[list[int]]
    output_lens: list[int]

    @property
    def prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))

    @property
    def output_tokens(self) -> int:
        return sum(self.output_lens)

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt with its answer."""
        return max(len(prompt) + out for prompt, out in zip(self.prompts, self.output_lens, strict=True))


@dataclass(frozen=True)
class Plan:
    """What every engine does, in this order.

    Attributes:
        kind: "throughput" (all prompts at once) or "latency" (one after the other).
        warm_up: run first, not measured.
        repeats: how often the workload is measured.
    """

    kind: str
    warm_up: Workload
    workload: Workload
    repeats: int


def draw(requests: int, prompt_len: range, output_len: range, vocab_size: int, seed: int) -> Workload:
    """Lengths and tokens, uniformly; the same for the same arguments."""
    chance = random.Random(seed)
    prompts, output_lens = [], []
    for _ in range(requests):
        length = chance.choice(prompt_len)
        output_lens.append(chance.choice(output_len))
        prompts.append([chance.randrange(vocab_size) for _ in range(length)])
    return Workload(prompts, output_lens)


def parse_range(text: str) -> range:
    """``16:512`` is 16 to 512, both included; ``64`` is always 64.

    Raises:
        ValueError: anything else.
    """
    first, colon, last = text.partition(":")
    if not first.isdigit() or (colon and not last.isdigit()) or int(first) < 1 or int(last or first) < int(first):
        raise ValueError(f"{text!r} is not a range of lengths: write 64, or 16:512 for 16 to 512")
    return range(int(first), int(last or first) + 1)
