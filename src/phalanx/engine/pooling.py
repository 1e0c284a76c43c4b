"""Pooling: from the hidden states of a prompt's tokens to its embedding."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from phalanx.engine.sampler import SampledRows
from phalanx.engine.staging import Staging
from phalanx.engine.step import POOL_LAST, Row
from phalanx.models.base import TransformerModel
from phalanx.ops.batch import RaggedBatch

Pooling = Literal["last", "mean"]
"""An embedding is the last token's hidden state, or the mean of all of them; of length 1 either way."""


def check_pooling(pooling: str) -> None:
    """Raises ValueError for an unknown one."""
    if pooling not in get_args(Pooling):
        raise ValueError(f"pooling={pooling!r}: expected one of {', '.join(get_args(Pooling))}")


@dataclass(frozen=True)
class Pooled:
    """What a step gave: float32 [len(owner), hidden] on the device, each of an entry ``owner`` of the step's rows."""

    states: Tensor
    owner: list[int]


def forward_pooled(
    model: TransformerModel, batch: RaggedBatch, rows: list[Row], staging: Staging
) -> tuple[Tensor, Pooled]:
    """The batch's logits, float32 [R, vocab], and for each row that wants it the last token's state or the sum of all,
    of the tokens that the step computes."""
    ends = np.cumsum([row.count for row in rows])
    owner = [index for index, row in enumerate(rows) if row.pool]
    firsts = [ends[index] - (1 if rows[index].pool == POOL_LAST else rows[index].count) for index in owner]
    wanted = np.concatenate([np.arange(first, ends[index]) for first, index in zip(firsts, owner, strict=True)])
    logits, states = model.forward_with_states(batch, staging.up(wanted)[0])
    counts = [int(ends[index] - first) for first, index in zip(firsts, owner, strict=True)]
    sums = [part.sum(dim=0, dtype=torch.float32) for part in states.split(counts)]
    return logits, Pooled(torch.stack(sums), owner)


def with_pooled(rows: SampledRows, pooled: Pooled | None) -> SampledRows:
    """What a step drew, and what it pooled."""
    return rows if pooled is None else replace(rows, pooled=pooled.states, pooled_owner=pooled.owner)


def unit(state: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The vector of the same direction that is 1 long, float32; of zeros, zeros."""
    wide = state.astype(np.float64)
    length = np.sqrt(np.sum(wide**2))
    return (wide / length if length else wide).astype(np.float32)
