"""Tensor parallelism of existing modules: a model is cut in place, by rules, over a group of ranks."""

from phalanx.parallel.loading import from_pretrained
from phalanx.parallel.parallelize import parallelize
from phalanx.parallel.registry import LayoutRegistry, ParameterLayout
from phalanx.parallel.verify import VerificationError, VerificationWarning

__all__ = [
    "LayoutRegistry",
    "ParameterLayout",
    "VerificationError",
    "VerificationWarning",
    "from_pretrained",
    "parallelize",
]
