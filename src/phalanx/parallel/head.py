"""The end of a causal LM whose head is cut by token ids: its loss, and logits that are whole or not there at all."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from phalanx.parallel.layers import ColumnLinear
from phalanx.parallel.loss import causal_lm_loss

_CAUSAL_LOSS = "ForCausalLMLoss"


class VocabHead:
    """Decides in each forward whether the head's logits are joined: those of all its `layers` alike, where an adapter
    has put several in its place.

    They are, unless the model is training, was given labels, and computes its loss from its logits by
    `loss_function`, which then works on each rank's share; the output then holds the loss and no logits.
    """

    def __init__(self, layers: Sequence[ColumnLinear], model: Any, gather_logits: bool) -> None:
        self.layers = tuple(layers)
        self._gather_always = gather_logits
        self._whole_loss = model.loss_function if computes_causal_loss(model) else None
        if self._whole_loss is not None:
            model.loss_function = self.loss
        model.register_forward_pre_hook(self.before, with_kwargs=True)
        model.register_forward_hook(self.after)

    @property
    def only_layer(self) -> ColumnLinear | None:
        """The layer, where it is one, whose logits go into the loss in shares."""
        alone = len(self.layers) == 1 and self._whole_loss is not None and not self._gather_always
        return self.layers[0] if alone else None

    def before(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        apart = not self._gather_always and self._whole_loss is not None and wants_loss_only(model, kwargs)
        for layer in self.layers:
            layer.cut.gather = not apart

    def after(self, model: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if self.layers[0].cut.gather:
            return None
        return without_logits(output)

    def loss(self, logits: Tensor, labels: Tensor | None = None, vocab_size: int = 0, **kwargs: Any) -> Any:
        cut = self.layers[0].cut
        if cut.gather and self._whole_loss is not None:
            return self._whole_loss(logits, labels, vocab_size, **kwargs)
        return causal_lm_loss(logits, labels, cut.vocab, sum(cut.sizes), cut.group, **loss_options(kwargs))


def wants_loss_only(model: Any, kwargs: Mapping[str, Any]) -> bool:
    """Whether a forward with these arguments is a training step's, whose logits nobody reads but the loss."""
    return bool(
        model.training
        and kwargs.get("labels") is not None
        and kwargs.get("return_dict") is not False
        and getattr(model.config, "return_dict", True)
    )


def without_logits(output: Any) -> Any:
    """A model's output without its logits."""
    return type(output)(**{name: value for name, value in output.items() if name != "logits"})


def loss_options(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """What transformers' loss of a causal LM knows of the keyword arguments that it is given."""
    return {name: kwargs[name] for name in ("num_items_in_batch", "ignore_index", "shift_labels") if name in kwargs}


def computes_causal_loss(model: Any) -> bool:
    """Whether the model's forward hands its logits to transformers' loss of a causal LM."""
    loss = getattr(model, "loss_function", None)
    forward = inspect.unwrap(type(model).forward)
    return getattr(loss, "__name__", "") == _CAUSAL_LOSS and "loss_function" in forward.__code__.co_names


def owner_of_head(model: nn.Module, head: nn.Module) -> nn.Module | None:
    """The causal LM in `model` whose output embedding `head` is, or is a part of (where an adapter wraps it)."""
    for module in model.modules():
        get = getattr(module, "get_output_embeddings", None)
        end = None if get is None else get()
        if isinstance(end, nn.Module) and any(part is head for part in end.modules()):
            return module
    return None
