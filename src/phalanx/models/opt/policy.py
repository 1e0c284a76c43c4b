"""How an OPT is put together."""

from __future__ import annotations

from typing import Any

from phalanx.models.container import LayerContainer
from phalanx.models.opt.container import NormedOuter, NormedProjectedOuter, OPTLayer, OPTOuter, ProjectedOuter
from phalanx.models.opt.model import OPTModel
from phalanx.models.policy import InferencePolicy

OUTER = {
    (False, False): OPTOuter,
    (True, False): NormedOuter,
    (False, True): ProjectedOuter,
    (True, True): NormedProjectedOuter,
}
"""The container outside the layers, by whether there are a final norm and projections."""


class OPTPolicy(InferencePolicy):
    model_types = ("opt",)
    model_class = OPTModel
    layer_container = OPTLayer
    layer_prefix = ("model.decoder.layers", "decoder.layers")

    def make_outer_container(self, model: Any) -> LayerContainer:
        return OUTER[model.final_normed, model.projected](model)
