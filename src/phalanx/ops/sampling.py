"""Sampling on the device, for a whole batch of rows at once. Plain PyTorch; nothing waits for the host.

The order is transformers': penalties, bias, masks, then temperature, top-k, top-p, min-p. A row's draw depends on its
own logits and its own random number only, never on the rows beside it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from phalanx.distributed.group import Group
from phalanx.ops import registry

PLUS_INFINITY, MINUS_INFINITY = 0x7F800000, -0x7F800001
"""The upper halves of ``rank_likeliest``'s keys."""


@dataclass(frozen=True)
class Penalties:
    """Penalties of P of the rows.

    Attributes:
        rows: int64 [P].
        history: int64 [P, L], the tokens of prompt and answer, anything beyond.
        lengths: int64 [P], tokens of it that count.
        prompt_lens: int64 [P], leading ones that were given.
        repetition, presence, frequency: float32 [P].
    """

    rows: Tensor
    history: Tensor
    lengths: Tensor
    prompt_lens: Tensor
    repetition: Tensor
    presence: Tensor
    frequency: Tensor


@dataclass(frozen=True)
class BadWords:
    """N pairs of a row and a token run whose last token must not follow the others.

    Attributes:
        rows: int64 [N].
        prefixes: int64 [N, L], right-aligned, -1 where nothing is asked.
        recent: int64 [N, L], the row's latest tokens, right-aligned, -2 where there are none.
        last: int64 [N], the token that is banned on a match.
    """

    rows: Tensor
    prefixes: Tensor
    recent: Tensor
    last: Tensor


@dataclass(frozen=True)
class Draw:
    """Random rows and their settings: int64 [D] rows, float32 [D] temperature, top_p, min_p, uniform; int64 [D] top_k
    (0: all). ``filtered`` says whether any row uses top-k, top-p or min-p."""

    rows: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    uniform: Tensor
    filtered: bool


def adjust_logits(
    logits: Tensor,
    penalties: Penalties | None,
    bias: tuple[Tensor, Tensor, Tensor] | None,
    bad_words: BadWords | None,
) -> Tensor:
    """Logits after penalties, bias and masks, float32 [R, V]; ``logits`` itself where nothing is asked.

    ``bias`` is (rows int64 [N], tokens int64 [N], values float32 [N]); -inf masks a token.
    """
    if penalties is None and bias is None and bad_words is None:
        return logits
    logits = logits.clone()
    if penalties is not None:
        logits[penalties.rows] = penalize(logits[penalties.rows], penalties)
    if bias is not None:
        rows, tokens, values = bias
        logits.index_put_((rows, tokens), values, accumulate=True)
    if bad_words is not None:
        match = ((bad_words.prefixes == bad_words.recent) | (bad_words.prefixes == -1)).all(-1)
        banned = torch.where(match, float("-inf"), 0.0)
        logits.index_put_((bad_words.rows, bad_words.last), banned, accumulate=True)
    return logits


def penalize(logits: Tensor, penalties: Penalties) -> Tensor:
    """Repetition (CTRL, arXiv:1909.05858) over prompt and answer; presence and frequency over the answer. [P, V]."""
    columns = torch.arange(penalties.history.shape[1], device=logits.device)
    known = columns < penalties.lengths[:, None]
    ids = torch.where(known, penalties.history, 0)
    seen = torch.zeros_like(logits).scatter_add_(1, ids, known.to(logits.dtype))
    answer = known & (columns >= penalties.prompt_lens[:, None])
    counts = torch.zeros_like(logits).scatter_add_(1, ids, answer.to(logits.dtype))
    factor = torch.where(logits > 0, 1.0 / penalties.repetition[:, None], penalties.repetition[:, None])
    logits = torch.where(seen > 0, logits * factor, logits)
    logits = logits - counts * penalties.frequency[:, None]
    return logits - (counts > 0) * penalties.presence[:, None]


def sample(logits: Tensor, draw: Draw | None) -> Tensor:
    """One token a row, int64 [R]: the likeliest, or for the rows of ``draw`` a drawn one. -1 where logits are not
    finite at their top (NaN anywhere, +inf, or all -inf)."""
    top, tokens = logits.max(dim=-1)
    if draw is not None:
        tokens = tokens.index_put((draw.rows,), draw_tokens(logits[draw.rows], draw))
    return torch.where(torch.isfinite(top), tokens, -1)


def draw_greedy(
    logits: Tensor, table: Tensor, slots: Tensor, columns: Tensor, group: Group | None = None, first: int = 0
) -> Tensor:
    """The likeliest token a row, int64 [R], as ``sample`` gives it; each is also written to its place in a token table.

    Args:
        logits: [R, V]; of several ranks, the part of a vocabulary that is this rank's.
        table: int64 [slots, columns], changed in place; a token that is -1 is written as 0. Its last column is never
            read.
        slots: int64 [R], rows of the table; -1: written nowhere that is read.
        columns: int64 [R].
        group: the ranks that the vocabulary is cut over; each gets the same tokens. None: it is whole.
        first: this rank's first token id.
    """
    rank = registry.select("rank_likeliest", device=logits.device, dtype=logits.dtype)
    take = registry.select("take_likeliest", device=logits.device, dtype=logits.dtype)
    keys: Tensor = rank(logits, first)
    if group is not None and group.size > 1:
        keys = group.all_reduce(keys.amax(-1, keepdim=True), "max")
    tokens: Tensor = take(keys, table, slots, columns)
    return tokens


def reference_rank_likeliest(logits: Tensor, first: int) -> Tensor:
    """A row's likeliest token as a number that is the larger, the likelier it is, and of equals the lower its id.

    Args:
        logits: [R, V] of the ids from ``first`` on.

    Returns:
        int64 [R, P], the largest of P counts: above, the float32 logit's bits as an integer of the same order (NaN as
        +inf); below, 2^32 - 1 - id. P is 1 here; others may look at parts of the vocabulary.
    """
    if logits.shape[1] == 0:
        return torch.full((logits.shape[0], 1), -(2**63), dtype=torch.int64, device=logits.device)
    # Adding 0 makes -0 the 0 that it is equal to.
    top, place = torch.where(logits.isnan(), float("inf"), logits.float() + 0.0).max(dim=-1)
    bits = top.view(torch.int32)
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    return ((ordered << 32) | (0xFFFFFFFF - (place + first)))[:, None]


def reference_take_likeliest(keys: Tensor, table: Tensor, slots: Tensor, columns: Tensor) -> Tensor:
    """The tokens of ``rank_likeliest``'s keys, -1 where the logit is infinite, written as ``draw_greedy`` says."""
    best = keys.amax(-1)
    ordered, token = best >> 32, 0xFFFFFFFF - (best & 0xFFFFFFFF)
    tokens = torch.where((ordered < PLUS_INFINITY) & (ordered > MINUS_INFINITY), token, -1)
    # The last column is never read: what padding draws goes there.
    table[slots.clamp_min(0), torch.where(slots >= 0, columns, table.shape[1] - 1)] = tokens.clamp_min(0)
    return tokens


def draw_tokens(logits: Tensor, draw: Draw) -> Tensor:
    """One token for each of the D rows, by inverting its distribution at ``uniform``. float32 [D, V] -> int64 [D]."""
    # From the top down: a temperature near 0 then gives the likeliest token, not infinities on both sides.
    scaled = (logits - logits.amax(-1, keepdim=True)) / draw.temperature[:, None]
    if not draw.filtered:
        return invert(scaled.softmax(-1), draw.uniform)
    ordered, order = scaled.sort(dim=-1, descending=True, stable=True)
    keep = keep_mask(ordered, draw.top_k, draw.top_p, draw.min_p)
    # Back in the order of the vocabulary: there, rounding cannot swap tokens that are nearly as likely.
    kept = torch.zeros_like(keep).scatter_(1, order, keep)
    return invert(scaled.masked_fill(~kept, float("-inf")).softmax(-1), draw.uniform)


def keep_mask(ordered: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Which of the logits [D, V], in falling order, top-k, then top-p, then min-p leave; the first always."""
    rank = torch.arange(ordered.shape[1], device=ordered.device)
    keep = (rank < torch.where(top_k > 0, top_k, ordered.shape[1])[:, None]).clone()
    probabilities = ordered.masked_fill(~keep, float("-inf")).softmax(-1)
    before = probabilities.cumsum(-1) - probabilities
    keep &= (before < top_p[:, None]) | (top_p >= 1)[:, None]
    kept = ordered.masked_fill(~keep, float("-inf")).softmax(-1)
    keep &= kept >= min_p[:, None] * kept[:, :1]
    keep[:, 0] = True
    return keep


def invert(probabilities: Tensor, uniform: Tensor) -> Tensor:
    """The first index at which the running sum of [D, V] passes ``uniform`` (float32 [D] in [0, 1)) of the total."""
    sums = probabilities.double().cumsum(-1)
    target = uniform.double()[:, None] * sums[:, -1:]
    index = torch.searchsorted(sums, target, right=True)[:, 0]
    # Rounding may put the target at the total: then the last token with any probability is meant.
    last = probabilities.shape[1] - 1 - probabilities.flip(-1).ne(0).to(torch.uint8).argmax(-1)
    return torch.minimum(index, last)


def top_logprobs(logits: Tensor, chosen: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities of raw logits [R, V]: of the ``chosen`` token [R], and ids and values of the ``count``
    likeliest (int64 and float32 [R, count])."""
    logprobs = logits.log_softmax(-1)
    mine = logprobs.gather(1, chosen.clamp_min(0)[:, None])[:, 0]
    values, ids = logprobs.topk(min(count, logits.shape[-1]), dim=-1)
    return mine, ids, values


def uniforms(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """A number in [0, 1) for each pair of a seed and a position (uint64 arrays), float32.

    A counter-based generator: splitmix64 (Steele, Lea, Flood 2014) over the pair, so it needs no state.
    """
    with np.errstate(over="ignore"):
        mixed = _splitmix(_splitmix(seeds.astype(np.uint64)) + positions.astype(np.uint64))
    return ((mixed >> np.uint64(40)).astype(np.float32)) * np.float32(2.0**-24)


def _splitmix(x: np.ndarray) -> np.ndarray:
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


registry.register("rank_likeliest", "reference", reference_rank_likeliest)
registry.register("take_likeliest", "reference", reference_take_likeliest)
