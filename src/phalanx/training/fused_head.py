"""TRL's trainers score tokens from the output head's weight; of a cut model, a rank holds only a part of that weight.

TRL gives a model a forward that takes `fused_lm_head=True`: it runs the body, takes the head's weight in hand, and
returns the log-probabilities of the labels, never the logits. Of a cut model it is given the whole weight, joined for
the time of the call; every rank then computes the same.
"""

from __future__ import annotations

import types
from typing import Any

from torch import nn

from phalanx.parallel.layers import ColumnLinear
from phalanx.parallel.regions import gather_out

_FLAG = "fused_lm_head"


def scores_tokens(model: nn.Module) -> bool:
    """Whether TRL has given `model` its forward."""
    code = getattr(getattr(vars(model).get("forward"), "__func__", None), "__code__", None)
    return code is not None and _FLAG in code.co_varnames


def join_head(model: nn.Module) -> None:
    """Let the forward that TRL gave to `model`, which is cut by now, find the whole head."""
    given: Any = model.forward

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        seen = _WithWholeHead(self) if kwargs.get(_FLAG) else self
        return given.__func__(seen, *args, **kwargs)

    forward.__wrapped__ = given.__func__.__wrapped__  # type: ignore[attr-defined]  # `generate` reads the signature
    model.forward = types.MethodType(forward, model)


class _WithWholeHead:
    """A model, but for its output head: that one is whole."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def get_output_embeddings(self) -> Any:
        head = self._model.get_output_embeddings()
        if not isinstance(head, ColumnLinear):
            return head
        cut = head.cut
        bias = None if head.bias is None else gather_out(head.bias, cut.group, 0, cut.sizes)
        return types.SimpleNamespace(weight=gather_out(head.weight, cut.group, 0, cut.sizes), bias=bias)
