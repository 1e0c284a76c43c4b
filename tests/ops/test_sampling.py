"""Sampling against transformers' own processors, and against the distribution that it claims to draw from."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from phalanx.ops.sampling import (
    BadWords,
    Draw,
    Penalties,
    adjust_logits,
    draw_tokens,
    keep_mask,
    sample,
    top_logprobs,
    uniforms,
)

VOCAB = 50


def logits(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


def column(*values: float) -> torch.Tensor:
    return torch.tensor(values)


@settings(deadline=None, max_examples=60)
@given(
    top_k=st.integers(0, VOCAB + 5),
    top_p=st.sampled_from([0.05, 0.3, 0.7, 0.95, 1.0]),
    min_p=st.sampled_from([0.0, 0.01, 0.2, 1.0]),
    temperature=st.sampled_from([0.3, 1.0, 2.5]),
    seed=st.integers(0, 50),
)
def test_the_tokens_left_are_those_that_transformers_leaves(
    top_k: int, top_p: float, min_p: float, temperature: float, seed: int
) -> None:
    raw = logits(3, seed)
    expected = TemperatureLogitsWarper(temperature)(None, raw)
    if top_k:
        expected = TopKLogitsWarper(top_k)(None, expected)
    if top_p < 1:
        expected = TopPLogitsWarper(top_p)(None, expected)
    if min_p:
        expected = MinPLogitsWarper(min_p)(None, expected)
    ordered, order = (raw / temperature).sort(dim=-1, descending=True)
    keep = keep_mask(ordered, torch.full((3,), min(top_k, VOCAB)), torch.full((3,), top_p), torch.full((3,), min_p))
    found = torch.zeros_like(keep).scatter(1, order, keep)
    assert torch.equal(found, torch.isfinite(expected))


def test_draws_follow_the_distribution() -> None:
    count = 20000
    raw = logits(1).expand(count, -1)
    draw = Draw(
        rows=torch.arange(count),
        temperature=torch.full((count,), 1.5),
        top_k=torch.full((count,), 20),
        top_p=torch.ones(count),
        min_p=torch.zeros(count),
        uniform=torch.from_numpy(uniforms(np.full(count, 7, np.uint64), np.arange(count, dtype=np.uint64))),
        filtered=True,
    )
    tokens = draw_tokens(raw, draw)
    expected = TopKLogitsWarper(20)(None, raw[:1] / 1.5).softmax(-1)[0]
    found = torch.bincount(tokens, minlength=VOCAB) / count
    # Five standard deviations of a binomial share.
    assert ((found - expected).abs() <= 5 * (expected * (1 - expected) / count).sqrt() + 1e-9).all()


@settings(deadline=None, max_examples=40)
@given(repetition=st.sampled_from([0.5, 1.2, 3.0]), seed=st.integers(0, 20))
def test_repetition_counts_prompt_and_answer_as_transformers_does(repetition: float, seed: int) -> None:
    raw = logits(1, seed)
    history = torch.randint(0, VOCAB, (1, 12), generator=torch.Generator().manual_seed(seed))
    expected = RepetitionPenaltyLogitsProcessor(repetition)(history, raw.clone())
    found = adjust_logits(raw, penalties(history, 12, 5, repetition=repetition), None, None)
    assert torch.allclose(found, expected, atol=1e-6)


def penalties(
    history: torch.Tensor,
    length: int,
    prompt_len: int,
    repetition: float = 1.0,
    presence: float = 0.0,
    frequency: float = 0.0,
) -> Penalties:
    one = torch.tensor([0])
    return Penalties(
        rows=one,
        history=history,
        lengths=torch.tensor([length]),
        prompt_lens=torch.tensor([prompt_len]),
        repetition=column(repetition),
        presence=column(presence),
        frequency=column(frequency),
    )


def test_presence_and_frequency_count_the_answer_only() -> None:
    raw = logits(1)
    history = torch.tensor([[3, 4, 4, 9, 4, 9, 9, 31]])
    found = adjust_logits(raw, penalties(history, 7, 3, presence=0.5, frequency=0.25), None, None)
    expected = raw.clone()
    expected[0, 9] -= 0.5 + 3 * 0.25
    expected[0, 4] -= 0.5 + 0.25
    assert torch.allclose(found, expected)


@settings(deadline=None, max_examples=60)
@given(
    words=st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=4), min_size=1, max_size=6),
    history=st.lists(st.integers(0, 4), min_size=1, max_size=6),
)
def test_bad_words_equal_transformers(words: list[list[int]], history: list[int]) -> None:
    raw = logits(1)
    # Older versions of transformers skip words as long as the whole history.
    history = [9, 9, 9, 9, *history]
    expected = NoBadWordsLogitsProcessor(words)(torch.tensor([history]), raw.clone())
    width = max(map(len, words)) - 1
    padded = [-2] * width + history
    bad = BadWords(
        rows=torch.zeros(len(words), dtype=torch.int64),
        prefixes=torch.tensor([[-1] * (width - len(word) + 1) + word[:-1] for word in words]).view(len(words), width),
        recent=torch.tensor([padded[len(padded) - width :] for _ in words]).view(len(words), width),
        last=torch.tensor([word[-1] for word in words]),
    )
    assert torch.equal(adjust_logits(raw, None, None, bad), expected)


def test_bias_is_added_and_rows_without_wishes_are_untouched() -> None:
    raw = logits(2)
    bias = (torch.tensor([1, 1]), torch.tensor([3, 3]), column(1.0, 0.5))
    found = adjust_logits(raw, None, bias, None)
    assert torch.equal(found[0], raw[0])
    assert found[1, 3] == raw[1, 3] + 1.5
    assert adjust_logits(raw, None, None, None) is raw


def test_rows_that_are_not_finite_are_marked() -> None:
    raw = logits(4)
    raw[1, 7] = float("nan")
    raw[2, 0] = float("inf")
    raw[3] = float("-inf")
    draw = Draw(
        torch.tensor([1, 3]),
        column(1.0, 1.0),
        torch.tensor([0, 0]),
        column(1, 1),
        column(0, 0),
        column(0.1, 0.9),
        False,
    )
    for how in (None, draw):
        assert sample(raw, how).tolist() == [int(raw[0].argmax()), -1, -1, -1]


@pytest.mark.parametrize("uniform", [0.0, 0.5, 0.99999994])
@pytest.mark.parametrize("filtered", [True, False])
def test_a_token_without_probability_is_never_drawn(uniform: float, filtered: bool) -> None:
    raw = torch.full((1, VOCAB), float("-inf"))
    raw[0, 20:23] = column(0.0, 1.0, -3.0)
    draw = Draw(torch.tensor([0]), column(1.0), torch.tensor([0]), column(1.0), column(0.0), column(uniform), filtered)
    assert 20 <= int(draw_tokens(raw, draw)) <= 22


def test_logprobs_are_of_the_raw_logits() -> None:
    raw = logits(2)
    mine, ids, values = top_logprobs(raw, torch.tensor([4, 5]), 3)
    expected = raw.log_softmax(-1)
    assert torch.equal(mine, expected[[0, 1], [4, 5]])
    assert torch.equal(values, expected.topk(3).values) and torch.equal(ids, expected.topk(3).indices)


def test_uniform_numbers_look_uniform_and_depend_on_both_arguments() -> None:
    seeds = np.repeat(np.arange(100, dtype=np.uint64), 100)
    positions = np.tile(np.arange(100, dtype=np.uint64), 100)
    values = uniforms(seeds, positions)
    assert values.min() >= 0 and values.max() < 1
    assert len(np.unique(values)) > 9990
    counts = np.histogram(values, bins=20, range=(0, 1))[0]
    assert abs(counts - 500).max() < 110
    grid = values.reshape(100, 100)
    assert abs(np.corrcoef(grid[:-1].ravel(), grid[1:].ravel())[0, 1]) < 0.05
    assert abs(np.corrcoef(grid[:, :-1].ravel(), grid[:, 1:].ravel())[0, 1]) < 0.05
