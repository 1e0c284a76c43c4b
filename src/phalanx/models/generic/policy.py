"""GenericPolicy: the policy of every model type that no family serves."""

from __future__ import annotations

import logging
from typing import Any

from phalanx.config import EngineConfig
from phalanx.distributed.group import Group
from phalanx.models.base import TransformerModel
from phalanx.models.generic.model import GenericModel
from phalanx.models.generic.proof import check_served_right
from phalanx.models.policy import InferencePolicy
from phalanx.parallel.loading import PendingWeights, load_pending
from phalanx.weights import WeightError

log = logging.getLogger("phalanx")


class GenericPolicy(InferencePolicy):
    """Builds transformers' own module and proves, on a small one of its architecture, that it is served right.

    Raises:
        ModelConfigError: it is not.
    """

    def instantiate_model(self, engine_config: EngineConfig, group: Group) -> TransformerModel:
        model = GenericModel(self.model_config, engine_config, group)
        check_served_right(model.module)
        log.warning(
            "model_type %r has no family here: transformers' own module is served (the generic path)",
            self.model_config["model_type"],
        )
        return model

    def populate_model_parameters(self) -> None:
        model: Any = self.model
        if self.source is None:
            raise WeightError("a model without a family cannot be read from a serialised checkpoint")
        if problems := self.source.verify():
            raise WeightError(*problems)
        model.module.pending_weights = PendingWeights(self.source, model.dtype)
        load_pending(model.module, model.registry, model.device)


def is_causal_lm(model_type: str) -> bool:
    """Whether transformers has a causal LM of this type."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
