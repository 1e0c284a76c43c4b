"""LayerTypes: models whose config says of each layer whether it sees everything or a window."""

from __future__ import annotations

from functools import cached_property

from phalanx.models.hf_config import ModelConfigError
from phalanx.models.traits import Traits

FULL, SLIDING = "full_attention", "sliding_attention"


class LayerTypes(Traits):
    """Windows by the config's ``layer_types``; a family says by ``layer_type`` what an older config without it means.

    Put it before the model class: ``class MyModel(LayerTypes, TransformerModel)``.
    """

    @cached_property
    def layer_types(self) -> tuple[str, ...]:
        """ "full_attention" or "sliding_attention" for every layer.

        Raises:
            ModelConfigError: another number of them than layers, or an unknown one.
        """
        given = self.config.get("layer_types")
        types = [self.layer_type(layer) for layer in range(self.num_layers)] if given is None else list(given)
        if len(types) != self.num_layers:
            raise ModelConfigError(f"the config lists {len(types)} layer_types for {self.num_layers} layers")
        unknown = sorted(str(kind) for kind in types if kind not in (FULL, SLIDING))
        if unknown:
            raise ModelConfigError(f"layer type {unknown[0]!r} is not supported: {FULL} and {SLIDING} are")
        return tuple(types)

    def layer_type(self, layer: int) -> str:
        """The type of a layer where the config lists none."""
        return FULL

    def window(self, layer: int) -> int | None:
        return self.sliding_window if self.layer_types[layer] == SLIDING else None
