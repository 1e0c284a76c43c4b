"""`deepspeed.utils`."""

import logging

__all__ = ["logger", "set_z3_leaf_modules"]

logger = logging.getLogger("phalanx")


def set_z3_leaf_modules(model: object, leaf_modules: object) -> list[object]:
    """At stage 3 layers are gathered whole, so that there are no smaller parts to keep together."""
    return []
