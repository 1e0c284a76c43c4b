"""Any other decoder of transformers, served through its own module: cut by `phalanx.parallel`, its attention routed to
the blocked KV cache, the rest untouched."""

from phalanx.models.generic.model import GenericModel
from phalanx.models.generic.policy import GenericPolicy, is_causal_lm

__all__ = ["GenericModel", "GenericPolicy", "is_causal_lm"]
