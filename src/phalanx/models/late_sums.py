"""Where the sums of row-cut weights over the ranks may wait for the norm that follows, which adds them up in one go."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from phalanx.models.base import TransformerModel

_STEPS = (
    "forward",
    "forward_local",
    "forward_layer",
    "forward_attention",
    "forward_mlp",
    "forward_layers",
    "forward_final",
    "forward_unembed",
    "make_norm_layer",
    "make_attn_out_layer",
    "make_mlp_2_layer",
)


def set_late_sums(model: TransformerModel, late: bool) -> None:
    """Has the sums over the ranks wait for the norm, or has each linear make its own."""
    model.norm.late_sums = model.attn_out.late_sum = model.mlp_2.late_sum = late


def sums_may_be_late(model: TransformerModel, base: type[TransformerModel]) -> bool:
    """Whether what attention and MLP give goes nowhere but into the residual's norm.

    That is so where no step in between is the family's own instead of ``base``'s, and no norm stands between the sum
    and the residual.
    """
    return (
        model.group.size > 1
        and not model.placement.batch_invariant
        and model.norm_placement == "pre"
        and all(getattr(type(model), step) is getattr(base, step) for step in _STEPS)
    )
